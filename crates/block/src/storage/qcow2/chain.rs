//! Opening of an image with its backing files and external data files.
//!
//! A process outside the sandbox opens the chain. Paths in headers are hostile: a guest that wrote a raw disk may have
//! written a header into it, and an image may come from anybody. So
//!
//! * the format of each member is the one that the image above it names; it is never found by the content;
//! * a member lies in the folder of the image or below it, unless [`ImageOptions::any_folder`] is set;
//! * no link is followed where a member was found, no file is a member twice, and a chain has an end;
//! * every header is validated before the library reads it.
//!
//! Each file is locked as a raw disk is: the image for writing, everything below it for reading.

// #syscall daemon openat,fstat: the files of an image

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::storage::file::{
    FileFacts, FileOptions, OpenFile, OpenFileError, lock_backing, refuse_below_overlay,
};
use crate::storage::folders::{FolderError, Folders};
use crate::storage::qcow2_header::{Backing, Header, HeaderError, path_of_name};

/// Maximum number of members of a chain.
pub const DEPTH_MAX: usize = 32;

/// Maximum number of files of a chain: one message passes them to the process that serves the disk.
pub const FILES_MAX: usize = 64;

/// Maximum memory in bytes for the tables of a chain.
const MEMORY_MAX: u64 = 512 << 20;

/// Advice to allow members outside the folder.
const ANY_HINT: &str =
    "--disk FILE,format=qcow2,backing=any; for a Xen guest target=qcow2,backing=any:FILE";

/// Options of an image that serves as a disk.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ImageOptions {
    pub file: FileOptions,
    /// Members may lie outside the folder of the image.
    pub any_folder: bool,
}

/// Format of a member of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberFormat {
    Qcow2,
    Raw,
}

/// Properties of a member, as the process that opened it found them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemberFacts {
    pub format: MemberFormat,
    pub file: FileFacts,
    /// Properties of the external data file, if there is one.
    pub data_file: Option<FileFacts>,
}

/// Properties of a chain.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChainFacts {
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// Binary logarithm of the cluster size of the image, and the version of its format.
    pub cluster_bits: u32,
    pub version: u32,
    /// Properties of the members, from the image down.
    pub members: Vec<MemberFacts>,
}

/// Member of a chain, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    pub path: PathBuf,
    /// Header, unless the member is raw.
    pub header: Option<Header>,
    pub data_file: Option<PathBuf>,
    pub facts: MemberFacts,
}

/// Chain that was opened and locked.
#[derive(Debug)]
pub struct OpenChain {
    pub members: Vec<Member>,
    /// Files in the order of the members; the external data file of a member follows the member's own.
    pub files: Vec<OwnedFd>,
}

/// Reasons for which a chain is not served.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    #[error(transparent)]
    File(#[from] OpenFileError),
    #[error("{}: {source}", path.display())]
    System { path: PathBuf, source: io::Error },
    #[error("{} {error}", path.display())]
    Header { path: PathBuf, error: HeaderError },
    /// Path of the image itself is in no allowed folder.
    #[error("{} is not below an allowed folder", path.display())]
    Elsewhere { path: PathBuf },
    #[error(
        "{} has the backing file {name}, whose format it does not name: name it (qemu-img rebase -u -b FILE -F raw or -F \
         qcow2)",
        path.display()
    )]
    NoFormat { path: PathBuf, name: String },
    #[error("{} has a backing file of the format {format}: raw and qcow2 are served", path.display())]
    Format { path: PathBuf, format: String },
    #[error("{} refers to {name}, which is not a path of a file: a chain has files alone", path.display())]
    NotFile { path: PathBuf, name: String },
    #[error("{} keeps its data in a file that it does not name: name it (qemu-img amend -o data_file=FILE)", path.display())]
    NoDataFile { path: PathBuf },
    #[error(
        "{} refers to {name}, which is {}, outside the folder {}: move it there, or allow other folders ({ANY_HINT})",
        path.display(), place.display(), folder.display()
    )]
    Outside { path: PathBuf, name: String, place: PathBuf, folder: PathBuf },
    #[error("{} refers to {name}: {source}", path.display())]
    Member { path: PathBuf, name: String, source: io::Error },
    #[error("{} refers to {}, which is in the chain already: a chain has no loops", path.display(), again.display())]
    Loop { path: PathBuf, again: PathBuf },
    #[error("{} has a chain of more than {DEPTH_MAX} images: merge some (qemu-img commit or rebase)", path.display())]
    Depth { path: PathBuf },
    #[error(
        "{} has a chain whose tables take up to {} MiB of memory, and the limit is {} MiB: merge some images",
        path.display(), bytes >> 20, MEMORY_MAX >> 20
    )]
    Memory { path: PathBuf, bytes: u64 },
}

/// Use of the chain that is opened.
#[derive(Clone, Copy)]
enum Purpose<'a> {
    /// Serving: files are locked, and a wait is reported.
    Serve(&'a dyn Fn(&str)),
    /// Serving above a disk in use, whose files are locked later; the others are locked, and a wait is reported.
    ServeAbove(&'a dyn Fn(&str)),
    /// Description: files are read, and not locked.
    Describe,
}

impl OpenChain {
    /// Opens and locks the chain of the image `path`. Waits for locks are reported to `report`.
    ///
    /// # Errors
    ///
    /// Returns [`ChainError`].
    pub fn open(
        path: &Path,
        options: &ImageOptions,
        report: &dyn Fn(&str),
    ) -> Result<OpenChain, ChainError> {
        Opener::new(options, None, Purpose::Serve(report)).run(path)
    }

    /// Opens and locks a chain whose image lies below one of `folders`. With [`ImageOptions::any_folder`] members may lie
    /// in each of them.
    ///
    /// # Errors
    ///
    /// Returns [`ChainError`].
    pub fn open_below(
        path: &Path,
        options: &ImageOptions,
        folders: &Folders,
    ) -> Result<OpenChain, ChainError> {
        let report = |text: &str| tracing::warn!("{text}");
        Opener::new(options, Some(folders), Purpose::Serve(&report)).run(path)
    }

    /// Opens the chain of an overlay above a disk that is in use, as [`OpenChain::open_below`] does. The files of the image
    /// below the overlay are locked by [`BackingLocks::take`], when the disk has given up its own locks.
    ///
    /// # Errors
    ///
    /// Returns [`ChainError`].
    pub fn open_above(
        path: &Path,
        options: &ImageOptions,
        folders: Option<&Folders>,
    ) -> Result<(OpenChain, BackingLocks), ChainError> {
        let report = |text: &str| tracing::warn!("{text}");
        let chain = Opener::new(options, folders, Purpose::ServeAbove(&report)).run(path)?;
        let below = chain.members.get(1).map_or(path, |member| &member.path);
        let locks = BackingLocks::of(&chain.facts(), &chain.files, below)
            .map_err(|source| ChainError::System { path: path.to_owned(), source })?;
        Ok((chain, locks))
    }

    /// Reads a chain without locks, to describe it.
    ///
    /// # Errors
    ///
    /// Returns the members that were read, and [`ChainError`].
    pub fn describe(
        path: &Path,
        options: &ImageOptions,
    ) -> Result<Vec<Member>, (Vec<Member>, ChainError)> {
        let served = options;
        let file = FileOptions { read_only: true, ..served.file.clone() };
        let options = ImageOptions { file, ..served.clone() };
        let mut opener = Opener::new(&options, None, Purpose::Describe);
        let opened = opener.open_all(path).and_then(|()| {
            let (Some(file), Some(image)) = (opener.files.first(), opener.members.first()) else {
                return Ok(());
            };
            Ok(refuse_below_overlay(file, &image.path, &served.file)?)
        });
        match opened {
            Ok(()) => Ok(opener.members),
            Err(error) => Err((opener.members, error)),
        }
    }

    /// Returns the properties of the chain.
    pub fn facts(&self) -> ChainFacts {
        let members = self.members.iter().map(|member| member.facts).collect();
        let header = self.members.first().and_then(|image| image.header.as_ref());
        let of_image = header.map(|header| (header.bytes, header.cluster_bits, header.version));
        let (bytes, cluster_bits, version) = of_image.unwrap_or_default();
        ChainFacts { bytes, cluster_bits, version, members }
    }
}

/// Files below an overlay that another disk still has for writing.
#[derive(Debug)]
pub struct BackingLocks(Vec<(OwnedFd, PathBuf)>);

impl BackingLocks {
    /// Selects the files below the image of a chain. `path` names them in messages.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no descriptor for a copy.
    pub fn of(facts: &ChainFacts, files: &[OwnedFd], path: &Path) -> io::Result<BackingLocks> {
        let count = |member: &MemberFacts| 1 + usize::from(member.data_file.is_some());
        let above = facts.members.first().map_or(0, count);
        let own = facts.members.get(1).map_or(0, count);
        let files = files.iter().skip(above).take(own);
        let copies = files.map(|file| Ok((file.try_clone()?, path.to_owned())));
        Ok(BackingLocks(copies.collect::<io::Result<_>>()?))
    }

    /// Returns `true` if these files are those of the disk, in their order.
    pub fn are_of(&self, disk: &[OwnedFd]) -> bool {
        let number = |file: &OwnedFd| {
            rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino, stat.st_rdev)).ok()
        };
        !disk.is_empty()
            && disk.len() == self.0.len()
            && disk.iter().zip(&self.0).all(|(own, (file, _))| number(own) == number(file))
    }

    /// Locks the files for reading.
    ///
    /// # Errors
    ///
    /// Returns the error of the first file that another program writes.
    pub fn take(&self) -> Result<(), OpenFileError> {
        self.0.iter().try_for_each(|(file, path)| lock_backing(file, path))
    }
}

/// Next member to open.
pub(super) struct Next {
    name: PathBuf,
    format: MemberFormat,
}

/// Chain that is being opened.
struct Opener<'a> {
    options: &'a ImageOptions,
    /// Folders of the image, if they are limited.
    folders: Option<&'a Folders>,
    purpose: Purpose<'a>,
    /// Folder of the image.
    folder: PathBuf,
    members: Vec<Member>,
    files: Vec<OwnedFd>,
    /// Device and inode number of each file, and its path.
    seen: Vec<((u64, u64), PathBuf)>,
}

impl<'a> Opener<'a> {
    fn new(
        options: &'a ImageOptions,
        folders: Option<&'a Folders>,
        purpose: Purpose<'a>,
    ) -> Opener<'a> {
        let (folder, members, files, seen) = (PathBuf::new(), vec![], vec![], vec![]);
        Opener { options, folders, purpose, folder, members, files, seen }
    }

    fn run(mut self, path: &Path) -> Result<OpenChain, ChainError> {
        self.open_all(path)?;
        Ok(OpenChain { members: self.members, files: self.files })
    }

    /// Opens the image and everything below it.
    fn open_all(&mut self, path: &Path) -> Result<(), ChainError> {
        let (file, path) = self.open_image(path)?;
        self.folder = path.parent().unwrap_or(Path::new("/")).to_owned();
        let mut next = self.add(file, path, MemberFormat::Qcow2)?;
        while let Some(Next { name, format }) = next {
            let above = self.members.last().map(|member| member.path.clone()).unwrap_or_default();
            if self.members.len() >= DEPTH_MAX {
                return Err(ChainError::Depth { path: self.members[0].path.clone() });
            }
            let (file, path) = self.open_member(&above, &name, true)?;
            next = self.add(file, path, format)?;
        }
        let bytes = self.members.iter().filter_map(|member| member.header.as_ref());
        let bytes = bytes.map(Header::memory).sum();
        if bytes > MEMORY_MAX {
            return Err(ChainError::Memory { path: self.members[0].path.clone(), bytes });
        }
        self.check_size()
    }

    /// Refuses a disk whose size is no multiple of its sectors.
    fn check_size(&self) -> Result<(), ChainError> {
        let Some(Member { path, header: Some(header), facts, .. }) = self.members.first() else {
            return Ok(());
        };
        let (bytes, sector) = (header.bytes, facts.file.sector_size);
        if bytes == 0 {
            let path = path.clone();
            return Err(OpenFileError::Empty { path, bytes }.into());
        }
        match bytes.is_multiple_of(sector.into()) {
            true => Ok(()),
            false => Err(header_error(path, HeaderError::Odd { bytes, sector })),
        }
    }

    /// Opens the image itself, as a raw disk is opened.
    fn open_image(&self, path: &Path) -> Result<(OwnedFd, PathBuf), ChainError> {
        let options = &self.options.file;
        let open = |flags: OFlags| -> Result<(OwnedFd, PathBuf), FolderError> {
            if let Some(folders) = self.folders {
                return folders.open(path, flags);
            }
            let system = |source: io::Error| FolderError::System { path: path.to_owned(), source };
            let file = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
            let file = file.map_err(|error| system(error.into()))?;
            Ok((file, std::fs::canonicalize(path).map_err(system)?))
        };
        match open(OpenFile::flags(options)) {
            Ok(opened) => Ok(opened),
            Err(FolderError::Elsewhere { path }) => Err(ChainError::Elsewhere { path }),
            Err(FolderError::System { path, source }) => {
                let reads = || open(OpenFile::reading()).is_ok();
                match OpenFile::denies_writing(&source, options, reads) {
                    true => Err(OpenFileError::NotWritable { path, source }.into()),
                    false => Err(ChainError::System { path, source }),
                }
            }
        }
    }

    /// Opens a file that the image `above` names.
    fn open_member(
        &self,
        above: &Path,
        name: &Path,
        read_only: bool,
    ) -> Result<(OwnedFd, PathBuf), ChainError> {
        let text = || name.display().to_string();
        let path = above.parent().unwrap_or(Path::new("/")).join(name);
        let file = FileOptions { read_only, ..self.options.file.clone() };
        let flags = OpenFile::flags(&file);
        let opened = match (self.options.any_folder, self.folders) {
            (true, Some(folders)) => folders.open(&path, flags),
            (true, None) => Folders::new(vec![PathBuf::from("/")]).open(&path, flags),
            (false, _) => Folders::new(vec![self.folder.clone()]).open(&path, flags),
        };
        opened.map_err(|error| match error {
            FolderError::System { source, .. } => {
                ChainError::Member { path: above.to_owned(), name: text(), source }
            }
            FolderError::Elsewhere { path: place } => ChainError::Outside {
                path: above.to_owned(),
                name: text(),
                place,
                folder: self.folder.clone(),
            },
        })
    }

    /// Locks and validates a member that was opened. Returns its backing file.
    fn add(
        &mut self,
        file: OwnedFd,
        path: PathBuf,
        format: MemberFormat,
    ) -> Result<Option<Next>, ChainError> {
        let read_only = self.options.file.read_only || !self.members.is_empty();
        let file = self.examine(file, &path, read_only)?;
        let header = match format {
            MemberFormat::Raw => None,
            MemberFormat::Qcow2 => {
                let read = Header::read(&file.file);
                let read = read.map_err(|source| ChainError::System { path: path.clone(), source });
                Some(read?.map_err(|error| header_error(&path, error))?)
            }
        };
        let next = header.as_ref().and_then(|header| header.backing.as_ref());
        let next = next.map(|backing| next_member(&path, backing)).transpose()?;
        let file = self.use_cache_mode(file, &path);
        let mut member = Member {
            path: path.clone(),
            facts: MemberFacts { format, file: file.facts, data_file: None },
            header,
            data_file: None,
        };
        self.files.push(file.file);
        if let Some(data_file) = member.header.as_ref().and_then(|header| header.data_file.as_ref())
        {
            let Some(name) = &data_file.name else { return Err(ChainError::NoDataFile { path }) };
            let name = path_of(&path, name)?;
            let (data, data_path) = self.open_member(&path, &name, read_only)?;
            let data = self.examine(data, &data_path, read_only)?;
            let data = self.use_cache_mode(data, &data_path);
            member.facts.data_file = Some(data.facts);
            member.data_file = Some(data_path);
            self.files.push(data.file);
        }
        self.members.push(member);
        Ok(next)
    }

    /// Locks a file and determines its properties. Refuses a file that is in the chain already.
    fn examine(
        &mut self,
        file: OwnedFd,
        path: &Path,
        read_only: bool,
    ) -> Result<OpenFile, ChainError> {
        let system = |source: io::Error| ChainError::System { path: path.to_owned(), source };
        let stat = rustix::fs::fstat(&file).map_err(|error| system(error.into()))?;
        let number = (stat.st_dev, stat.st_ino);
        let above = self.members.last().map_or(path, |member| &member.path).to_owned();
        if let Some((_, again)) = self.seen.iter().find(|(other, _)| *other == number) {
            return Err(ChainError::Loop { path: above, again: again.clone() });
        }
        self.seen.push((number, path.to_owned()));
        let options = FileOptions { read_only, ..self.options.file.clone() };
        let report = match self.purpose {
            // The member is added after its files were examined.
            Purpose::ServeAbove(_) if self.members.len() == 1 => None,
            Purpose::Serve(report) | Purpose::ServeAbove(report) => Some(report),
            Purpose::Describe => None,
        };
        Ok(OpenFile::of_image(file, path, &options, report)?)
    }

    /// Sets O_DIRECT on a file if the options ask for it, after its header was read.
    fn use_cache_mode(&self, file: OpenFile, path: &Path) -> OpenFile {
        match self.purpose {
            Purpose::Serve(_) | Purpose::ServeAbove(_) => {
                file.with_cache_mode(path, &self.options.file)
            }
            Purpose::Describe => file,
        }
    }
}

fn header_error(path: &Path, error: HeaderError) -> ChainError {
    ChainError::Header { path: path.to_owned(), error }
}

/// Returns the backing file of an image.
pub(super) fn next_member(path: &Path, backing: &Backing) -> Result<Next, ChainError> {
    let owned = || path.to_owned();
    let name = path_of(path, &backing.name)?;
    let format = match backing.format.as_deref() {
        Some("raw" | "file" | "host_device") => MemberFormat::Raw,
        Some("qcow2") => MemberFormat::Qcow2,
        Some(other) => {
            return Err(ChainError::Format { path: owned(), format: other.to_owned() });
        }
        None => return Err(ChainError::NoFormat { path: owned(), name: backing.name.clone() }),
    };
    Ok(Next { name, format })
}

/// Returns the path that a name in the header of `path` stands for.
fn path_of(path: &Path, name: &str) -> Result<PathBuf, ChainError> {
    path_of_name(name).map(Path::to_owned).ok_or_else(|| {
        let name = name.chars().take(256).collect();
        ChainError::NotFile { path: path.to_owned(), name }
    })
}
