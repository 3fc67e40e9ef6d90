"""Give each Python process the device with PRETEND_CUDA=1, and its process group with WORLD_SIZE=1."""

import os

if os.environ.get("COVERAGE_PROCESS_START"):
    import coverage

    coverage.process_startup()
if os.environ.get("PRETEND_CUDA") == "1":
    import pretend  # noqa: F401

    if os.environ.get("WORLD_SIZE") == "1":
        import world_of_one

        world_of_one.install()
