"""`bench serve --parts`: systems x popularities x rates, a cell at a time, kept in a folder; one table, one picture."""
