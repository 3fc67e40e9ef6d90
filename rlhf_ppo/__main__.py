"""`python -m rlhf_ppo`, the same as `rlhf-ppo`."""

from rlhf_ppo.cli.main import main

if __name__ == "__main__":
    main()
