"""Constraints for tests, and an engine whose requests follow them."""

import numpy as np

from twinspark.engine.choosing import Chooser
from twinspark.engine.core import Engine
from twinspark.engine.endings import Endings


class Steps:
    """Token n of the form is one of `sets[n]`, in a cycle if asked; the form ends with the sets.

    Args:
        sets: ids by place.
        repeats: begins again after the last set, and so never ends.
    """

    def __init__(self, vocab_size, sets, *, repeats=False, place=0):
        self._vocab_size, self._sets, self._repeats = vocab_size, sets, repeats
        self.place = place

    @property
    def is_finished(self):
        return not self._repeats and self.place == len(self._sets)

    def mask(self):
        allowed_V = np.zeros(self._vocab_size, np.bool_)
        allowed_V[list(self._sets[self.place % len(self._sets)])] = True
        return allowed_V

    def advance(self, token):
        if self.is_finished or not self.mask()[token]:
            raise ValueError(f"token {token} does not fit at place {self.place}")
        self.place += 1

    def copy(self):
        return Steps(self._vocab_size, self._sets, repeats=self._repeats, place=self.place)


class Anything:
    """No mask; finished after so many tokens."""

    def __init__(self, num_tokens):
        self._left = num_tokens

    @property
    def is_finished(self):
        return self._left == 0

    def mask(self):
        return None

    def advance(self, token):
        self._left -= 1

    def copy(self):
        return Anything(self._left)


class FormEngine(Engine):
    """An engine that gives every request a constraint.

    Args:
        form: request -> constraint, or None for none.
    """

    def __init__(self, *args, form, **settings):
        super().__init__(*args, **settings)
        self._form = form

    def _new_session(self, request, limit):
        session = super()._new_session(request, limit)
        session.chooser = Chooser(
            request, seed=session.seed, sampler=self._sampler, constraint=self._form(request)
        )
        session._endings = Endings(
            request, limit=limit, tokenizer=self._tokenizer, constraint=session.chooser.constraint
        )
        return session
