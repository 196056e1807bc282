"""Where every number lives, on both sides: names, rules, regions, the compiled plan. numpy only at import."""
