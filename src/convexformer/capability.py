"""Protocols that say what an object can do, and answer ``isinstance`` fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from abc import ABCMeta as ProtocolMeta
else:
    ProtocolMeta = type(Protocol)

_KNOWN: WeakKeyDictionary[type, dict[type, bool]] = WeakKeyDictionary()


class Capability(ProtocolMeta):
    """The metaclass of runtime-checkable protocols whose answer depends on the class of an object alone.

    Python looks at every member of the protocol at each question (10 microseconds before version 3.12), and solvers ask
    dozens of times a fit; here the answer for a class is remembered.
    """

    def __instancecheck__(self, instance: Any) -> bool:
        answers = _KNOWN.setdefault(type(instance), {})
        if self not in answers:
            answers[self] = super().__instancecheck__(instance)
        return answers[self]
