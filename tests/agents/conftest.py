"""Episodes need a newer TRL and transformers than the package's oldest ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_ppo.data.conversation import check_versions


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder with the reason that a user is given."""
    try:
        check_versions()
    except ValueError as error:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))
