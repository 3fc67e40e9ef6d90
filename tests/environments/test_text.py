"""`text_environment`: Gymnasium itself, and the base classes of other packages as those packages call them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhf_ppo.environments.pool import Environments, EpisodeError, answer_texts
from rlhf_ppo.environments.tools import text_environment

gymnasium = pytest.importorskip("gymnasium")
from tests.environments import adapted  # noqa: E402

PROMPT = [{"role": "user", "content": "Q"}]


@pytest.fixture(params=["thread", "process"])
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., Environments]]:
    made: list[Environments] = []

    def make(factory: Any, **options: Any) -> Environments:
        made.append(Environments(factory, isolation=request.param, timeout=30.0, **options))
        return made[-1]

    yield make
    for environments in made:
        environments.close()


def test_a_game_of_gymnasium(pool: Callable[..., Environments]) -> None:
    environments = pool(text_environment(adapted.lake, adapted.cell, adapted.ACTIONS, invalid="what ? {observation}"))
    kind = environments.kinds[None]
    assert (kind.class_name, kind.is_text, kind.has_turn_rewards, kind.has_reward) == (
        "FrozenLakeEnv", True, True, False,
    )  # fmt: skip
    assert kind.schemas is None

    won, drowned = environments.start([{"prompt": "Go"}, {"prompt": "Go"}], [1, 2])
    assert (won.observation, drowned.observation) == ("0 0", "0 0")
    rounds = [
        answer_texts([won], [text])[0] for text in ("down", " down\n", "jump", "right", "right", "down", "right")
    ]

    assert [one.observation for one in rounds] == ["1 0", "2 0", "what ? 2 0", "2 1", "2 2", "3 2", "3 3"]
    assert [one.turn_reward for one in rounds] == [0, 0, 0, 0, 0, 0, 1]
    assert [one.done for one in rounds] == [False] * 6 + [True]
    assert [one.answers[0].failed for one in rounds] == [False, False, True, False, False, False, False]
    fell = [answer_texts([drowned], [text])[0] for text in ("right", "down")][-1]
    assert (fell.done, fell.truncated, fell.turn_reward) == (True, False, 0)

    environments.release()
    (again,) = environments.start([{"prompt": "Go"}], [3])
    assert again.observation == "0 0" and not answer_texts([again], ["left"])[0].done


def test_a_game_that_gymnasium_cuts_is_truncated(pool: Callable[..., Environments]) -> None:
    (episode,) = pool(text_environment(adapted.short_lake, adapted.cell, adapted.ACTIONS)).start([{}], [0])

    rounds = [answer_texts([episode], ["left"])[0] for _ in range(3)]

    assert [(one.done, one.truncated) for one in rounds] == [(False, False), (False, False), (False, True)]


def test_the_seed_decides_the_game() -> None:
    factory = text_environment(lambda: gymnasium.make("Blackjack-v1"), lambda seen, _: str(seen), {"stick": 0})
    environments = Environments(factory)

    first, same, other = environments.start([{}, {}, {"seed": 12}], [7, 7, 7])

    assert first.observation == same.observation != other.observation


def test_an_observation_without_text_asks_for_render() -> None:
    environments = Environments(text_environment(lambda: gymnasium.make("Blackjack-v1"), actions={"hit": 1}))

    with pytest.raises(EpisodeError, match=r"row 0 .*BlackjackEnv.*reset failed.*observes tuple.*pass render="):
        environments.start([{}])


def test_old_gym_and_ragen(pool: Callable[..., Environments]) -> None:
    ended, cut = pool(text_environment(adapted.RagenEnv)).start([{}, {}], [5, 6])

    one, other = answer_texts([ended, cut], ["go", "cut"])

    assert (ended.observation, cut.observation) == ("5 left 3", "6 left 3")
    assert (one.observation, one.turn_reward, one.done, one.truncated) == ("go: left 2", 0.25, True, False)
    assert (other.observation, other.turn_reward, other.done, other.truncated) == ("cut: left 2", 0.25, False, True)


def test_skyrl_gym(pool: Callable[..., Environments]) -> None:
    environments = pool(text_environment(adapted.Sum))
    (episode,) = environments.start([{"prompt": PROMPT, "answer": "4"}])
    wrong, right = answer_texts([episode], ["5"])[0], answer_texts([episode], ["4"])[0]

    assert environments.kinds[None].class_name == "Sum"
    assert episode.observation == " Think."
    assert (wrong.observation, wrong.turn_reward, wrong.done) == ("Wrong.\nTurn 1.", 0.0, False)
    assert (right.observation, right.turn_reward, right.done) == ("", 1.0, True)

    environments.release()
    (new,) = environments.start([{"prompt": PROMPT, "answer": "7"}])
    assert answer_texts([new], ["7"])[0].done
    with pytest.raises(EpisodeError, match=r"row 0 .*Sum.*postprocessed_action"):
        answer_texts([new], ["rewrite"])


def test_an_invalid_first_message_gets_the_first_observation_again(pool: Callable[..., Environments]) -> None:
    environments = pool(text_environment(adapted.Sum, actions={"4": "4", "5": "5"}, invalid="Again:{observation}"))
    for _ in range(2):
        (episode,) = environments.start([{"prompt": PROMPT, "answer": "4"}])
        assert answer_texts([episode], ["what"])[0].observation == "Again: Think."
        assert answer_texts([episode], ["5"])[0].observation == "Wrong.\nTurn 1."
        environments.release()


def test_openrlhf(pool: Callable[..., Environments]) -> None:
    (episode,) = pool(text_environment(adapted.Agent)).start([{"prompt": "Q", "label": "L"}])

    first, second = answer_texts([episode], ["a"])[0], answer_texts([episode], ["b"])[0]

    assert episode.observation == "?"
    assert (first.observation, first.turn_reward, first.done) == ("[Q?|a|L]", 0.5, False)
    assert (second.observation, second.turn_reward, second.done) == ("[Q?a[Q?|a|L]|b|L]", 1.0, True)


@pytest.mark.parametrize("client", [adapted.EnvClient, adapted.SyncEnvClient])
def test_openenv(client: Any, pool: Callable[..., Environments]) -> None:
    (episode,) = pool(text_environment(client, adapted.text_of, adapted.Echo)).start([{}], [4])

    first, second = answer_texts([episode], ["n"])[0], answer_texts([episode], ["end"])[0]

    assert episode.observation == "seed 4"
    assert (first.observation, first.turn_reward, first.done) == ("nn", 0.0, False)
    assert (second.observation, second.turn_reward, second.done) == ("endend", 2.0, True)


def test_the_adapter_imports_nothing_of_what_it_adapts() -> None:
    from rlhf_ppo.environments import tools

    assert not {"gymnasium", "gym", "skyrl_gym", "openrlhf", "openenv", "ragen", "torch"} & vars(tools).keys()
