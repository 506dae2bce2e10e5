"""The verbs over a pair: `compress` makes a delta of it, `analyze` looks at it before."""
