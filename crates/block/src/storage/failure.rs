//! Failures of storage: the one table from error numbers of the system to what a disk's user is told.
//!
//! File systems, block devices and NBD servers fail with many error numbers. The protocols of disks have few. Blkback
//! and the NBD export both translate by [`Failure::of`], so that a full quota is "no space" for either.

/// Reason of a failed request, as far as the protocols of disks tell reasons apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Failure {
    /// No space for the data: `ENOSPC`; a quota (`EDQUOT`) or a size limit of files (`EFBIG`) that is reached.
    NoSpace,
    /// Storage that may not be written: `EROFS`, `EPERM`, `EACCES`, `ETXTBSY`.
    NotPermitted,
    /// Operation that the storage does not have: `EOPNOTSUPP`, `ENOSYS`.
    Unsupported,
    /// Request that the storage refuses as malformed: `EINVAL`.
    Invalid,
    /// No memory for the request: `ENOMEM`, `ENOBUFS`.
    NoMemory,
    /// Reply that would be too long: `EOVERFLOW`.
    TooLong,
    /// Server that shuts down: `ESHUTDOWN`.
    ShuttingDown,
    /// Every other error number, such as `EIO`, `ESTALE`, `ENXIO`, `ENODEV`, `ENODATA`, `ETIMEDOUT`, `EUCLEAN`.
    Io,
}

impl Failure {
    /// Returns the reason that an error number stands for.
    pub fn of(errno: i32) -> Failure {
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Failure::NoSpace,
            libc::EROFS | libc::EPERM | libc::EACCES | libc::ETXTBSY => Failure::NotPermitted,
            libc::EOPNOTSUPP | libc::ENOSYS => Failure::Unsupported,
            libc::EINVAL => Failure::Invalid,
            libc::ENOMEM | libc::ENOBUFS => Failure::NoMemory,
            libc::EOVERFLOW => Failure::TooLong,
            libc::ESHUTDOWN => Failure::ShuttingDown,
            _ => Failure::Io,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_a_file_system_has_its_reason() {
        for (errno, failure) in [
            (libc::ENOSPC, Failure::NoSpace),
            (libc::EDQUOT, Failure::NoSpace),
            (libc::EFBIG, Failure::NoSpace),
            (libc::EROFS, Failure::NotPermitted),
            (libc::EPERM, Failure::NotPermitted),
            (libc::EACCES, Failure::NotPermitted),
            (libc::ETXTBSY, Failure::NotPermitted),
            (libc::EOPNOTSUPP, Failure::Unsupported),
            (libc::ENOSYS, Failure::Unsupported),
            (libc::EINVAL, Failure::Invalid),
            (libc::ENOMEM, Failure::NoMemory),
            (libc::EIO, Failure::Io),
            (libc::ESTALE, Failure::Io),
            (libc::ENXIO, Failure::Io),
            (libc::ENODEV, Failure::Io),
            (libc::ENODATA, Failure::Io),
            (libc::ETIMEDOUT, Failure::Io),
            (libc::EUCLEAN, Failure::Io),
            (libc::EREMOTEIO, Failure::Io),
            (0, Failure::Io),
            (-1, Failure::Io),
        ] {
            assert_eq!(Failure::of(errno), failure, "errno {errno}");
        }
    }
}
