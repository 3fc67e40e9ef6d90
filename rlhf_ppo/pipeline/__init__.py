"""SFT, reward model, PPO, judge and report from one file: which steps there are, and running those that are left."""
