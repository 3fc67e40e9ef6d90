"""What is broken in the room `algorithm`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("advantages.py", "tests/algorithm/test_turns.py::test_by_hand"): [
        ("starts[:, 1:] &= ~response_mask[:, :-1]", "pass"),
        ("advantages.gather(1, first)", "advantages"),
    ],
    (
        "advantages.py",
        (
            "tests/algorithm/test_advantages.py "
            "tests/algorithm/test_by_hand.py "
            "tests/algorithm/test_losses.py "
            "tests/algorithm/test_masked.py "
            "tests/algorithm/test_penalties.py "
            "tests/algorithm/test_properties.py"
        ),
    ): [
        ("gamma * _next_values", "lam * _next_values"),
        ("_discounted_sums(deltas, gamma * lam)", "_discounted_sums(deltas, lam)"),
        ("_discounted_sums(deltas, gamma * lam)", "_discounted_sums(deltas, gamma)"),
        ("bootstrap_values) - values", "bootstrap_values) + values"),
        ("is_last, bootstrap_values.float()[:, None], next_values", "is_last, 0.0, next_values"),
        ("is_last[:, :-1] &= ~real[:, 1:]", "pass"),
        ("next_values[:, -1] = 0.0", "pass"),
        ("values.roll(-1, dims=1)", "values.roll(1, dims=1)"),
        ("real = response_mask.gather(1, places)", "real = response_mask"),
        ("zero_outside(rewards, response_mask).gather(1, places)", "zero_outside(rewards, response_mask)"),
        ("zero_outside(values, response_mask).gather(1, places)", "zero_outside(values, response_mask)"),
        ("places.argsort(dim=1)", "places"),
        ("advantages.gather(1, tokens), (", "advantages, ("),
        ("advantages + values", "advantages + rewards"),
        ("advantages + values", "advantages - values"),
        ("step += discount * following", "step += following"),
    ],
    (
        "losses.py",
        (
            "tests/algorithm/test_losses.py "
            "tests/algorithm/test_advantages.py "
            "tests/algorithm/test_by_hand.py "
            "tests/algorithm/test_masked.py "
            "tests/algorithm/test_penalties.py "
            "tests/algorithm/test_properties.py"
        ),
    ): [
        ("unclipped_loss = -advantages * ratio\n", "unclipped_loss = advantages * ratio\n"),
        ("logprobs.float() - old_logprobs.float()).exp()", "old_logprobs.float() - logprobs.float()).exp()"),
        ("loss = torch.maximum(", "loss = torch.minimum("),
        (
            "PolicyLoss(loss if weights is None else loss * weights, ratio, clipped)",
            "PolicyLoss(loss, ratio, clipped)",
        ),
        ("loss * weights, ratio, clipped)", "loss / weights, ratio, clipped)"),
        ("logprobs.float() - sampling_logprobs.float()", "sampling_logprobs.float() - logprobs.float()"),
        (".clamp(max=clip_max)", ""),
        (".clamp(max=clip_max)", ".clamp(min=clip_max)"),
        (".clamp(max=clip_max).detach()", ".clamp(max=clip_max)"),
        ("clamp(1 - cliprange, 1 + high)", "clamp(max=1 + high)"),
        ("clamp(1 - cliprange, 1 + high)", "clamp(min=1 - cliprange)"),
        ("clipped = clipped_loss > unclipped_loss", "clipped = clipped_loss >= unclipped_loss"),
        ("clipped = clipped_loss > unclipped_loss", "clipped = clipped_loss < unclipped_loss"),
        (
            "torch.maximum(unclipped_loss, clipped_loss), clipped",
            "torch.minimum(unclipped_loss, clipped_loss), clipped",
        ),
        ("torch.maximum(unclipped_loss, clipped_loss), clipped", "unclipped_loss, clipped"),
        ("loss), clipped_loss > unclipped_loss)", "loss), clipped_loss >= unclipped_loss)"),
        ("old_values - cliprange_value, old", "returns - cliprange_value, old"),
        ("0.5 * (values - returns)", "(values - returns)"),
        ("0.5 * (nearby_values - returns)", "(nearby_values - returns)"),
        ("zero_outside(per_token, mask).sum() / num_tokens", "zero_outside(per_token, mask).sum() / mask.sum()"),
        ("zero_outside(per_token, mask).sum() / num_tokens", "per_token.float().sum() / num_tokens"),
        ("0.5 * (logprobs.float()", "(logprobs.float()"),
        ("masked_var(returns.float() - values.float(), mask, reduce_sum)", "masked_var(values, mask, reduce_sum)"),
        ("masked_var(returns, mask, reduce_sum)", "masked_var(returns, mask)"),
        ("torch.where(returns_var > 0, 1 - residual_var / returns_var, 0.0)", "1 - residual_var / returns_var"),
    ],
    ("losses.py", "tests/algorithm/test_recipes.py"): [
        ("(lengths > 0).sum()", "torch.tensor(len(lengths))"),
        ("num_responses if reduce_sum is None else reduce_sum(num_responses)", "num_responses"),
        ("(num_responses * lengths.clamp(min=1))", "num_responses"),
        ("(num_responses * lengths.clamp(min=1))", "lengths.clamp(min=1)"),
        ("(num_responses * response_length)", "response_length"),
        ("(num_responses * response_length)", "num_responses"),
        ("positive = mask & is_positive[:, None]", "positive = mask | is_positive[:, None]"),
        ("num_positive if reduce_sum is None else reduce_sum(num_positive)", "num_positive"),
        ("high = cliprange if cliprange_high is None else cliprange_high", "high = cliprange"),
        ("torch.where(advantages < 0, -dual_clip * advantages", "torch.where(advantages > 0, -dual_clip * advantages"),
        ("torch.minimum(loss, most)", "torch.maximum(loss, most)"),
        ("clipped | (loss > most)", "clipped"),
        ("zero_outside(logprobs.float() - old_logprobs.float(), mask)", "logprobs.float() - old_logprobs.float()"),
        ("/ mask.sum(dim=1, keepdim=True).clamp(min=1)", "/ mask.shape[1]"),
        ("of_token.detach() - mean.detach()", "of_token.detach() + mean.detach()"),
        ("of_token.detach() - mean.detach()", "of_token.detach() - mean"),
        ("advantages, cliprange, weights, cliprange_high\n", "advantages, cliprange, None, cliprange_high\n"),
        ("advantages, cliprange, weights, cliprange_high\n", "advantages, cliprange, weights\n"),
        ("logprobs.detach().float()", "logprobs.float()"),
        ("-ratio.clamp(max=max_weight)", "-ratio"),
        ("loss * weights, ratio, torch.zeros_like(limited)", "loss, ratio, torch.zeros_like(limited)"),
        ("ratio, torch.zeros_like(limited)", "ratio, limited"),
        ("limited = ratio > max_weight", "limited = ratio < max_weight"),
        (
            "if cliprange_value is None:\n        return ValueLoss(unc",
            "if cliprange_value is None:\n        return ValueLoss(2 * unc",
        ),
    ],
    ("penalties.py", "tests/algorithm/test_recipes.py"): [
        ("-0.2), 0.2)", "-0.2), 0.3)"),
        ("mean_kl / self.target - 1, -0.2", "mean_kl / self.target - 1, -0.3"),
        ("mean_kl / self.target - 1", "mean_kl / self.target"),
        ("error * min(num_episodes, self.horizon) / self.horizon", "error * self.horizon / num_episodes"),
        ("min(num_episodes, self.horizon) / self.horizon", "num_episodes / self.horizon"),
        ("if math.isnan(mean_kl):", "if False:"),
        ("max(moved, sys.float_info.min)", "moved"),
        ("if not 0 <= coef < math.inf", "if not coef < math.inf"),
    ],
    ("advantages.py", "tests/algorithm/test_recipes.py"): [
        ("(1 - 1 / (alpha *", "(1 - alpha / ("),
        ("clamp(min=1))).clamp(min=0)\n", "clamp(min=1)))\n"),
    ],
    (
        "masked.py",
        (
            "tests/algorithm/test_masked.py "
            "tests/algorithm/test_advantages.py "
            "tests/algorithm/test_by_hand.py "
            "tests/algorithm/test_losses.py "
            "tests/algorithm/test_penalties.py "
            "tests/algorithm/test_properties.py"
        ),
    ): [
        ("torch.where(mask, values.float(), 0.0)", "values.float() * mask"),
        ("torch.where(mask, values.float(), 0.0)", "torch.where(~mask, values.float(), 0.0)"),
        ("torch.where(mask, values.float(), 0.0)", "torch.where(mask, values, 0.0)"),
        ("total.float() / (num_tokens - 1).clamp(min=1)", "total.float() / num_tokens.clamp(min=1)"),
        ("(num_tokens - 1).clamp(min=1)", "(num_tokens - 1)"),
        ("return total / num_tokens.clamp(min=1)", "return total / num_tokens"),
        ("return total / num_tokens.clamp(min=1)", "return total / mask.numel()"),
        ("mask.sum().float()", "torch.tensor(float(mask.shape[0] * mask.shape[1]))"),
        (
            "total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)\n    return",
            "total, num_tokens = sums\n    return",
        ),
        (
            "total, exact_total, num_tokens = sums if reduce_sum is None else reduce_sum(sums)",
            "total, exact_total, num_tokens = sums",
        ),
        ("total, num_others = sums if reduce_sum is None else reduce_sum(sums)", "total, num_others = sums"),
        ("zero_outside(values - mean, mask).square()", "zero_outside(values, mask).square()"),
        ("zero_outside(values - mean, mask)", "(values - mean)"),
        ("values.to(exact).sum()", "values.sum().to(exact)"),
        ("((values.to(exact) != exact_mean) & mask)", "(values.to(exact) != exact_mean)"),
        ("torch.where(are_equal, 0.0, var)", "var"),
        ("torch.where(are_equal, exact_mean.float(), mean)", "mean"),
        ("whitened if shift_mean else whitened + mean", "whitened + mean"),
        ("whitened if shift_mean else whitened + mean", "whitened + mean if shift_mean else whitened"),
        ("(values.float() - mean) * torch.rsqrt", "(values.float() - mean) / torch.rsqrt"),
        ("rsqrt(var + 1e-8)", "rsqrt(var + 1e-5)"),
        ("if mask.shape != values.shape:", "if False:"),
    ],
    ("masked.py", "tests/rewards/test_shaping.py::test_moments_of_batches_are_those_of_all_scores_together"): [
        ("math.sqrt(self.squares / (self.count - 1))", "math.sqrt(self.squares / self.count)"),
        ("mean=self.mean + distance * added / count", "mean=self.mean + distance * added"),
    ],
    ("masked.py", "tests/rewards/test_shaping.py::test_equal_scores_have_no_spread"): [
        ("scores = scores.to(exact_type(scores.device))", "scores = scores.float()"),
    ],
    (
        "penalties.py",
        (
            "tests/algorithm/test_penalties.py "
            "tests/algorithm/test_advantages.py "
            "tests/algorithm/test_by_hand.py "
            "tests/algorithm/test_losses.py "
            "tests/algorithm/test_masked.py "
            "tests/algorithm/test_properties.py"
        ),
    ): [
        ("logprobs.float() - ref_logprobs.float()", "ref_logprobs.float() - logprobs.float()"),
        ("logprobs.float() - ref_logprobs.float()", "logprobs - ref_logprobs"),
        ("torch.expm1(-log_ratio) + log_ratio", "torch.expm1(log_ratio) - log_ratio"),
        ("torch.expm1(-log_ratio) + log_ratio", "(-log_ratio).exp() - 1 + log_ratio"),
        ("scores - penalty", "scores + penalty"),
        ("torch.where(stopped,", "torch.where(~stopped,"),
        ("zero_outside(-kl_coef *", "zero_outside(kl_coef *"),
        ("zero_outside(-kl_coef * kl.float(), response_mask)", "-kl_coef * kl.float()"),
        ("num_tokens_left == 1", "num_tokens_left == 2"),
        ("response_mask & (num_tokens_left == 1)", "(num_tokens_left == 1)"),
        ("response_mask.flip(1).cumsum(dim=1).flip(1)", "response_mask.cumsum(dim=1)"),
        ("if empty.any():", "if False:"),
        ("rewards + zero_outside(token_scores", "rewards - zero_outside(token_scores"),
        ("zero_outside(token_scores, response_mask)", "token_scores"),
        ("rewards if token_scores is None else rewards +", "rewards if token_scores is None else"),
    ],
}
