"""How the reports of two runs are compared."""

import numpy as np

SESSION = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eps", "time/tokens_per_second"}


def numbers(log):
    """What was logged, without what a clock says."""
    return [{k: v for k, v in entry.items() if k not in SESSION and not k.startswith("time/")} for entry in log]


def updates(log):
    """The log without its last entry, which is about this call of `train` alone."""
    return numbers(entry for entry in log if "train_runtime" not in entry)


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
