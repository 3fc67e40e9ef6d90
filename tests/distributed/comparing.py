"""How the reports of two runs are compared."""

import numpy as np
import pytest

SESSION = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eps", "time/tokens_per_second"}


def numbers(log):
    """What was logged, without what a clock says."""
    return [{k: v for k, v in entry.items() if k not in SESSION and not k.startswith("time/")} for entry in log]


def updates(log):
    """The log without its last entry, which is about this call of `train` alone."""
    return numbers(entry for entry in log if "train_runtime" not in entry)


def assert_logs_alike(rank, of_ddp):
    """A rank under any engine has logged what one of DDP has; DeepSpeed keeps single models' gradients to itself."""
    hidden = set() if rank["zero_stage"] is None else {"policy/grad_norm", "val/grad_norm"}
    for ours, theirs in zip(numbers(rank["log"]), numbers(of_ddp["log"]), strict=True):
        common = {name: value for name, value in theirs.items() if name not in hidden}
        assert ours == pytest.approx(common, rel=1e-3, abs=1e-4)


def assert_same_end(resumed, whole):
    """Every rank of two runs has logged, learned and drawn the same, bit for bit."""
    for one, other in zip(resumed, whole, strict=True):
        assert updates(one["log"]) == updates(other["log"])
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, value in other["parameters"].items():
            np.testing.assert_array_equal(one["parameters"][name], value, err_msg=name)
        assert len(one["optimizer"]) == len(other["optimizer"]) > 0
        for ours, theirs in zip(one["optimizer"], other["optimizer"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(one["random"], other["random"])


def assert_same_step(two, one):
    """Two processes take the step of one that has all their prompts."""
    ours, theirs = numbers(two["log"])[0], numbers(one["log"])[0]
    if two["zero_stage"] is not None:  # DeepSpeed keeps the gradients of single parameters to itself
        of_one_model = theirs.pop("policy/grad_norm"), theirs.pop("val/grad_norm")
        assert theirs["grad_norm"] == pytest.approx(sum(norm**2 for norm in of_one_model) ** 0.5, rel=1e-5)
    assert ours.pop("val/ratio_var") == pytest.approx(theirs.pop("val/ratio_var"), abs=1e-6)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, value in one["parameters"].items():
        np.testing.assert_allclose(two["parameters"][name], value, rtol=0, atol=1e-6, err_msg=name)
