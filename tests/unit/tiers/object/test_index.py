from kvstrata.tiers.object.index import Entry, Index, ObjectName

ANY = Entry(10, float("inf"))


def capped(max_bytes: int, *paths: str) -> Index:
    index = Index(1000, max_bytes)
    for path in paths:
        index.note(path, ANY)
    return index


def anything(name: ObjectName) -> bool:
    return True


def test_without_a_cap_only_the_last_are_remembered() -> None:
    index = Index(2, None)
    for path in "abc":
        index.note(path, ANY)
    assert [path in index for path in "abc"] == [False, True, True]
    assert index.fits(10**9)
    index.check()


def test_with_a_cap_nothing_is_forgotten_by_itself() -> None:
    index = Index(1, 1000)
    for path in "abc":
        index.note(path, ANY)
    assert len(index) == 3


def test_room_is_made_by_the_least_recently_used() -> None:
    index = capped(30, "a", "b", "c")
    index.touch(["a", "b"], 0.0)
    assert list(index.make_room(10, anything)) == ["c"]
    assert list(index.make_room(20, anything)) == ["b"]


def test_room_is_not_made_by_what_must_stay() -> None:
    index = capped(30, "a", "b", "c")
    assert list(index.make_room(10, lambda path: path != "a")) == ["b"]
    assert list(index.make_room(10**6, lambda path: False)) == []


def test_what_leaves_counts_until_it_has_left() -> None:
    index = capped(30, "a", "b", "c")
    victims = index.make_room(10, anything)
    assert not index.fits(10)
    index.left(victims)
    assert index.fits(10)
    index.check()


def test_what_could_not_leave_is_known_again_and_first_to_go() -> None:
    index = capped(30, "a", "b", "c")
    index.stayed(index.make_room(20, anything))
    assert index.used_bytes == 30
    assert index.leaving_bytes == 0
    assert list(index.make_room(10, anything)) == ["a"]


def test_what_is_being_written_counts() -> None:
    index = capped(30, "a")
    index.reserved_bytes = 10
    assert index.fits(10)
    index.reserved_bytes = 20
    assert not index.fits(10)


def test_a_listing_is_adopted_but_for_what_changed_meanwhile() -> None:
    index = capped(1000, "gone", "kept", "fresh")
    sizes = {"kept": 10, "new": 20, "deleted": 10}
    listed: dict[ObjectName, tuple[int, float]] = {name: (b, 0.0) for name, b in sizes.items()}
    assert index.adopt(listed, {"fresh", "deleted"}.__contains__) == ["gone"]
    assert [path for path in ("kept", "new", "fresh") if path in index] == ["kept", "new", "fresh"]
    assert "deleted" not in index
    assert index.used_bytes == 40


def test_a_listed_object_is_counted_but_not_yet_trusted() -> None:
    index = capped(1000)
    index.adopt({"new": (20, 0.0)}, lambda path: False)
    assert "new" in index
    assert not index.holds("new", 0.0)


def test_one_namespace_is_forgotten_alone() -> None:
    index = capped(1000, "one/a", "one/b", "two/a")
    index.forget_all(lambda name: isinstance(name, str) and name.startswith("one/"))
    assert len(index) == 1
    assert "two/a" in index
    assert index.used_bytes == 10


def test_somewhat_more_leaves_where_the_cap_is_large() -> None:
    index = capped(1000, *(str(i) for i in range(100)))
    assert len(index.make_room(10, anything)) == 3
    index.check()


def test_what_was_not_used_for_long_is_idle_unless_it_must_stay() -> None:
    index = Index(1000, 1000)
    for path, used_at_s in (("a", 10.0), ("b", 20.0), ("c", 30.0), ("d", 40.0)):
        index.note(path, ANY, used_at_s)
    assert list(index.idle(35.0, anything)) == ["a", "b", "c"]
    index.touch(["b"], 50.0)
    assert list(index.idle(35.0, lambda path: path != "a")) == ["c"]
    index.forget("c")
    index.check()


def test_without_a_cap_nothing_is_idle() -> None:
    index = Index(1000, None)
    index.note("a", ANY, 10.0)
    assert list(index.idle(35.0, anything)) == []


def test_what_was_listed_is_as_old_as_the_listing_says() -> None:
    index = Index(1000, 1000)
    index.adopt({"old": (10, 5.0), "new": (10, 20.0)}, lambda path: False)
    assert list(index.idle(10.0, anything)) == ["old"]
