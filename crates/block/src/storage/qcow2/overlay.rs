//! Creation of an overlay: an empty image whose backing file is a disk that a guest uses.
//!
//! The library of the format writes the image, as `qemu-img create -b` would: version 3, clusters of 64 KiB, refcounts of 16
//! bits, and the format of the backing file in the header. The file is new, so no image is ever overwritten.

// #syscall none: the command of an administrator creates overlays, in no sandbox

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use imago::FormatCreateBuilder as _;
use imago::qcow2::Qcow2;
use ringfence_sys::images::ImageStorage;
use rustix::fs::{AtFlags, Mode, OFlags};

use super::chain::MemberFormat;
use super::file::{MemberFile, Stopped};
use crate::storage::below;
use crate::storage::file::{CacheMode, FileOptions, OpenFile, OpenFileError};

/// Maximum length in bytes of the name of a backing file in a header (`qcow2.rst`).
const NAME_MAX: usize = 1023;

/// Maximum size in bytes of a disk: its L1 table has 32 MiB with these clusters, the most that an image may have.
const BYTES_MAX: u64 = 1 << 51;

type Image = Qcow2<ImageStorage<MemberFile>>;

/// Parameters of a new overlay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OverlaySpec {
    /// Path of the new image.
    pub path: PathBuf,
    /// Image or raw file below it, and its format.
    pub backing: PathBuf,
    pub format: MemberFormat,
    /// Size of the disk in bytes.
    pub bytes: u64,
}

/// Overlay that was created. The file is removed again unless it is kept.
#[derive(Debug)]
pub struct Overlay {
    /// Path without links.
    pub path: PathBuf,
    /// The backing file lies in another folder, which must be allowed when the image is opened.
    pub needs_any_folder: bool,
    /// Reason for which the backing file does not name the overlay, so that it is opened for writing again (`below.rs`).
    pub unmarked: Option<io::Error>,
    folder: OwnedFd,
    is_kept: bool,
}

/// Reasons for which no overlay was created.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    #[error("{} exists already: an overlay is a new file", path.display())]
    Exists { path: PathBuf },
    #[error("an image has at most {BYTES_MAX} bytes, and the disk has {bytes}")]
    Size { bytes: u64 },
    #[error("{} is no name of a file", path.display())]
    Name { path: PathBuf },
    #[error(
        "the path {} cannot stand in the header of an image: it has more than {NAME_MAX} bytes, or bytes that are no UTF-8",
        path.display()
    )]
    Backing { path: PathBuf },
    #[error("{}: {source}", path.display())]
    System { path: PathBuf, source: io::Error },
    #[error(transparent)]
    File(#[from] OpenFileError),
}

impl Overlay {
    /// Creates an overlay as a new file, durably. No link is followed, and an existing file is left as it is.
    ///
    /// # Errors
    ///
    /// Returns [`OverlayError`]; there is no new file then.
    pub fn create(spec: &OverlaySpec) -> Result<Overlay, OverlayError> {
        let system = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| OverlayError::System { path, source }
        };
        if spec.bytes > BYTES_MAX {
            return Err(OverlayError::Size { bytes: spec.bytes });
        }
        let no_name = || OverlayError::Name { path: spec.path.clone() };
        let name = spec.path.file_name().ok_or_else(no_name)?;
        let parent = match spec.path.parent().ok_or_else(no_name)? {
            parent if parent.as_os_str().is_empty() => Path::new("."),
            parent => parent,
        };
        let parent = std::fs::canonicalize(parent).map_err(system(parent))?;
        let backing = std::fs::canonicalize(&spec.backing).map_err(system(&spec.backing))?;
        // A chain is searched in the folder of its image and below.
        let below = backing.strip_prefix(&parent).ok();
        let backing_name = name_in_header(below.unwrap_or(&backing))
            .ok_or_else(|| OverlayError::Backing { path: backing.clone() })?;
        let path = parent.join(name);
        let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&parent, directory, Mode::empty());
        let folder = folder.map_err(|error| system(&parent)(error.into()))?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode_of(&backing).map_err(system(&backing))?);
        let file = rustix::fs::openat(&folder, name, flags, mode).map_err(|error| match error {
            rustix::io::Errno::EXIST => OverlayError::Exists { path: path.clone() },
            error => system(&path)(error.into()),
        })?;
        // From here on, dropping it removes the file.
        let needs_any_folder = below.is_none();
        let mut overlay =
            Overlay { path, needs_any_folder, unmarked: None, folder, is_kept: false };
        overlay.format(file, spec, backing_name)?;
        overlay.unmarked = below::mark(&backing, &overlay.path).err();
        Ok(overlay)
    }

    /// Writes the empty image to the new file.
    fn format(
        &self,
        file: OwnedFd,
        spec: &OverlaySpec,
        backing: String,
    ) -> Result<(), OverlayError> {
        let system = |source: io::Error| OverlayError::System { path: self.path.clone(), source };
        let options = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
        let durable = file.try_clone().map_err(system)?;
        let OpenFile { file, facts, .. } = OpenFile::of_image(file, &self.path, &options, None)?;
        let storage = ImageStorage::new(MemberFile::new(file, facts, &Stopped::default()));
        let format = match spec.format {
            MemberFormat::Raw => "raw",
            MemberFormat::Qcow2 => "qcow2",
        };
        let image = Image::create_builder(storage);
        let image = image.size(spec.bytes).backing(backing, format.to_owned());
        image.create().map_err(system)?;
        rustix::fs::fsync(&durable).map_err(|error| system(error.into()))?;
        rustix::fs::fsync(&self.folder).map_err(|error| system(error.into()))
    }

    /// Keeps the file of the overlay.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        if let (false, Some(name)) = (self.is_kept, self.path.file_name()) {
            // The folder was opened once, so no other file of that path is removed.
            let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
        }
    }
}

/// Returns the name of a backing file as the header has it.
fn name_in_header(path: &Path) -> Option<String> {
    let name = path.to_str()?;
    let first = name.split('/').next().unwrap_or(name);
    // The part before a colon would be the name of a protocol.
    let name = if first.contains(':') { format!("./{name}") } else { name.to_owned() };
    (name.len() <= NAME_MAX).then_some(name)
}

/// Returns the permissions of a new image: those of its backing file.
fn mode_of(backing: &Path) -> io::Result<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = std::fs::metadata(backing)?;
    // The permissions of a block device say nothing about files.
    let mode = if metadata.is_file() { metadata.mode() & 0o666 } else { 0 };
    Ok(mode | 0o600)
}
