"""Who has to go when links are lost and both ends live."""

from __future__ import annotations

from elastic.suspects import GRACE_SECONDS, MINORITY_GRACE_SECONDS, Suspects


def cut(suspects: Suspects, members: set[int], pairs: list[tuple[int, int]]) -> list[int]:
    """All lose these links again and again, and all answer: who has to go, one after the other."""
    gone: list[int] = []
    for _ in range(20):
        for low, high in pairs:
            if {low, high} & set(gone):
                continue
            if (culprit := suspects.lost(high, low, 0.0, dialled=True)) is not None:
                gone.append(culprit)
                suspects.forget(culprit)
        for worker in members:
            suspects.clear(worker)
    return gone


def test_of_a_pair_the_younger_goes() -> None:
    assert cut(Suspects(), {0, 1, 2, 3}, [(1, 3)]) == [3]


def test_one_that_is_cut_from_all_goes_alone_whatever_its_age() -> None:
    for lonely in range(4):
        pairs = [(min(lonely, other), max(lonely, other)) for other in range(4) if other != lonely]
        assert cut(Suspects(), set(range(4)), pairs) == [lonely]


def test_the_larger_part_goes_on() -> None:
    small, large = {1, 3}, {0, 2, 4}
    pairs = sorted((min(a, b), max(a, b)) for a in small for b in large)
    assert set(cut(Suspects(), small | large, pairs)) == small


def test_of_two_halves_one_whole_half_goes() -> None:
    gone = set(cut(Suspects(), {0, 1, 2, 3}, [(0, 2), (0, 3), (1, 2), (1, 3)]))
    assert gone == {2, 3}


def test_what_the_dead_lost_is_forgotten() -> None:
    suspects = Suspects()
    assert cut(suspects, {0, 1, 2}, [(0, 1), (0, 2)]) == [0]
    assert suspects.broken(1) == suspects.broken(2) == []


def test_a_link_that_breaks_now_and_then_costs_nobody_the_place() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert suspects.lost(1, 2, 0.0) is None
        assert suspects.lost(2, 1, 0.0) is None
        suspects.clear(1)
        suspects.clear(2)


def test_the_many_are_believed_at_once_and_the_few_later() -> None:
    """One worker that has lost three is perhaps the one that is cut off; the three may just be busy."""
    members = {0, 1, 2, 3}
    many, few = Suspects(), Suspects()
    for reporter in (0, 1, 2):
        many.lost(reporter, 3, 0.0)
    assert many.gone(members, GRACE_SECONDS) == [3]
    for peer in (1, 2, 3):
        few.lost(0, peer, 0.0)
    assert few.gone(members, GRACE_SECONDS) == []
    assert few.gone(members, MINORITY_GRACE_SECONDS) == [1, 2, 3]
