//! Changes of an image that a guest uses.

use std::io;
use std::sync::Arc;

use super::disk::QcowDisk;
use crate::storage::file::give_up_writing;
use crate::storage::{Disk, LiveDisk};

impl LiveDisk for QcowDisk {
    fn storage_bytes(&self) -> io::Result<u64> {
        Err(fixed_size())
    }

    fn enlarge(&self, _: u64) -> io::Result<()> {
        Err(fixed_size())
    }

    fn resized(&self, _: u64) -> io::Result<Arc<dyn Disk>> {
        Err(fixed_size())
    }

    fn become_backing(&self) -> io::Result<()> {
        self.own_files.iter().try_for_each(|file| give_up_writing(file.file()))
    }
}

/// Returns the error for a change of the size of an image.
fn fixed_size() -> io::Error {
    io::Error::other("an image is enlarged while no guest uses it (qemu-img resize)")
}
