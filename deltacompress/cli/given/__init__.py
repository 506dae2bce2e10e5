"""What the command line is given: the arguments and options that verbs share, and what is told of them early."""
