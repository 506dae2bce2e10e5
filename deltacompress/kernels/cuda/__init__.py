"""SBMM and ingest in CUDA C++, compiled at first use; the sources lie beside these modules."""
