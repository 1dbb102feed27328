import pickle

from pipeline.recent import Recent


def test_the_result_that_was_used_longest_ago_makes_room() -> None:
    recent: Recent[str, int] = Recent(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent.get(key, lambda value=value: value)
    assert [recent.get(key, lambda: 0) for key in "acb"] == [1, 4, 0]


def test_a_copy_begins_empty_and_keeps_as_many() -> None:
    recent: Recent[str, int] = Recent(1)
    recent.get("a", lambda: 1)
    copy = pickle.loads(pickle.dumps(recent))
    assert [copy.get(key, lambda n=n: n) for n, key in enumerate("aba")] == [0, 1, 2]
