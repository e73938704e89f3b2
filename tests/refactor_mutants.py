"""Mutated refactors."""


def mutants(refactor, subject, count, user):
    return iter(())
