//! Storage of a disk as the driver domain serves it now, and a change of it that has begun (`disk_changes`).

use std::io;
use std::os::fd::OwnedFd;

use ringfence_block::storage::file::FileKind;
use ringfence_block::storage::qcow2::{BackingLocks, MemberFormat};
use ringfence_driver::switchboard::Medium;
use ringfence_uplink_process::egress::live::ClientId;

use crate::commands::ServedFacts;
use crate::disk::Source;

/// Storage of a disk as it is served now.
pub(crate) enum Storage {
    /// File, block device or image.
    File(ServedFile),
    /// Disk of an NBD server, by its address.
    Server(String),
}

/// File, block device or image that the driver domain serves.
pub(crate) struct ServedFile {
    /// Path, for people.
    pub(crate) text: String,
    /// Copies of the descriptors of the file, and of the external data file of an image: those that the guest writes.
    pub(crate) files: Vec<OwnedFd>,
    pub(crate) facts: ServedFacts,
    pub(crate) kind: FileKind,
    /// Change that the driver domain has not answered.
    pub(crate) pending: Option<PendingChange>,
    /// Clients whose change of the size the frontend has not seen yet, with the size.
    pub(crate) resizing: Vec<(ClientId, u64)>,
}

impl Storage {
    /// Records opened storage. `place` is the disk's option.
    pub(crate) fn of(place: &Source, medium: &Medium, files: &[OwnedFd]) -> io::Result<Storage> {
        let (path, any_folder) = match place {
            Source::File { path, .. } => (path, false),
            Source::Image { path, options } => (path, options.any_folder),
            Source::Nbd { address, .. } => return Ok(Storage::Server(address.to_string())),
        };
        let path = std::path::absolute(path)?.into_os_string();
        let (count, kind, format, bytes, sector_size, options) = match medium {
            Medium::File { facts, options } => {
                (1, facts.kind, MemberFormat::Raw, facts.bytes, facts.sector_size, options)
            }
            Medium::Image { chain, options } => {
                let Some(image) = chain.members.first() else {
                    return Err(io::Error::other("a chain has an image"));
                };
                let (count, file) = (1 + usize::from(image.data_file.is_some()), image.file);
                (count, file.kind, MemberFormat::Qcow2, chain.bytes, file.sector_size, options)
            }
            Medium::Nbd(_) => return Ok(Storage::Server(place.to_string())),
        };
        let (options, text) = (options.clone(), place.to_string());
        let facts = ServedFacts { path, format, any_folder, bytes, sector_size, options };
        let files = files.iter().take(count).map(OwnedFd::try_clone).collect::<Result<_, _>>()?;
        Ok(Storage::File(ServedFile {
            text,
            files,
            facts,
            kind,
            pending: None,
            resizing: Vec::new(),
        }))
    }
}

/// Change that the driver domain has not answered.
pub(crate) struct PendingChange {
    pub(crate) client: ClientId,
    pub(crate) what: Change,
}

/// Kind of a change, with what its end needs.
pub(crate) enum Change {
    Snapshot {
        /// File of the overlay.
        overlay: OwnedFd,
        /// Files below it, which were the disk's.
        below: BackingLocks,
        facts: Box<ServedFacts>,
    },
    Resize {
        bytes: u64,
    },
}
