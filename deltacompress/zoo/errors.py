"""What can go wrong in a zoo: a subtree of deltacompress.errors, so that exit codes and handlers fit.

ZooError
|-- NotAZooError            a path without zoo.json                                          exit code 2
|-- InvalidNameError        breaks the grammar of names                                      exit code 2
|-- NotFoundError           no such entry, version or alias; or it was removed               exit code 2
|-- ConflictError           somebody else was first, or the name is taken                    exit code 2
|-- CapabilityError         the store lacks what a zoo needs                                 exit code 2
|-- StoreError              the store cannot be read or written (read-only, gone)            exit code 2
|   `-- DiskFullError       no room for what is to be written                                exit code 2
|-- PullError               the target of a pull cannot be written                           exit code 2
|   `-- CacheFullError      what is in use leaves an entry no room in the cache              exit code 2
|-- ZooFormatError          written by a newer version                                       exit code 3
|-- DamagedRecordError      a reference or manifest is not what was written                  exit code 3
|-- DamagedBlobError        bytes differ from their hash                                     exit code 3
`-- MissingBlobError        referenced bytes are not there                                   exit code 3
"""

from __future__ import annotations

from deltacompress.errors import (
    ChecksumError,
    DeltaCompressError,
    FormatError,
    InputError,
    OutputError,
    SchemaVersionError,
    TruncatedFileError,
)


class ZooError(DeltaCompressError):
    """Root of the zoo's errors."""


class NotAZooError(ZooError, InputError):
    """A path or URL that holds no zoo."""


class InvalidNameError(ZooError, InputError):
    """A name, version or alias that breaks the grammar."""


class NotFoundError(ZooError, InputError):
    """No such entry, version or alias."""


class ConflictError(ZooError, InputError):
    """Somebody else was first, or something else is there already."""


class CapabilityError(ZooError, InputError):
    """The store cannot do what a zoo rests on."""


class StoreError(ZooError, InputError):
    """The store could not be read or written."""


class DiskFullError(StoreError):
    """No room is left where the store lies."""


class PullError(ZooError, OutputError):
    """The target of a pull cannot be written."""


class CacheFullError(PullError):
    """What is in use leaves an entry no room in the cache."""


class ZooFormatError(ZooError, SchemaVersionError):
    """A zoo or record that a newer version wrote."""


class DamagedRecordError(ZooError, FormatError):
    """A small object (reference, manifest, zoo.json) that is not what was written."""


class DamagedBlobError(ZooError, ChecksumError):
    """A blob whose bytes differ from its hash."""


class MissingBlobError(ZooError, TruncatedFileError):
    """A blob that an entry needs and the store does not have."""
