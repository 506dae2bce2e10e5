"""One walk of a pair: what each part takes and loses by each rung, what that does to answers, and who judges."""
