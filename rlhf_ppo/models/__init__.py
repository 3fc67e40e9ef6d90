"""The four models of PPO: policy, value model, reference policy and reward model."""
