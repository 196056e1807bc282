"""Why engine and trainer disagree: the checks of `link.bisect`. May import planning, trainer and below."""
