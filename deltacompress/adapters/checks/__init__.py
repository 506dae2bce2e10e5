"""Do the tensors of an adapter fit the base? One file for each kind; arithmetic over names and shapes."""
