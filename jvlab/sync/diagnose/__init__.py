"""Why engine and trainer disagree: the checks of `link.bisect`. May import trainer and below."""
