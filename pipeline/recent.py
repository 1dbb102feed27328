"""Keep the results that were used last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Recent[Key: Hashable, Value]:
    """At most `size` results, by key. A copy for another process begins empty."""

    def __init__(self, size: int) -> None:
        """Keep none yet."""
        self._size = size
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def __reduce__(self) -> tuple[type["Recent[Key, Value]"], tuple[int]]:
        return Recent, (self._size,)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return a kept result, else make and keep it.

        Example:
            >>> recent = Recent(1)
            >>> [recent.get(*each) for each in (("a", dict), ("a", list), ("b", list))]
            [{}, {}, []]
        """
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
