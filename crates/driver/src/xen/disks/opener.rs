//! Opening of a disk's storage, on a thread of its own.
//!
//! Opening can take long. A file stays locked until the last write of an earlier daemon has completed,
//! a server may not answer, and a network file system may hang. The control thread polls [`Opening`]
//! and never waits for it.

// #syscall daemon fstatfs: whether a disk is on another machine

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{
    Bounce, CacheMode, Engine, FileDisk, FileOptions, OpenFile, OpenFileError,
};
use ringfence_block::storage::folders::{FolderError, Folders};
use ringfence_block::storage::qcow2::{
    BackingLocks, ChainError, ImageOptions, OpenChain, QcowDisk,
};
use ringfence_memory::UringPool;
use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};
use rustix::fs::OFlags;

use super::keys::Source;

/// File systems whose files are on another machine (magic numbers of `linux/magic.h`).
const REMOTE: [u64; 6] = [
    0x6969,      // NFS
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x00C3_6400, // Ceph
    0x5346_414F, // AFS
    0x0102_1997, // 9P
];

/// Storage to open and the options for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OpenRequest {
    pub(super) source: Source,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    /// Set if the toolstack asserts that the storage does not read a page after its write has completed.
    pub(super) direct_io_safe: bool,
    pub(super) cache: CacheMode,
    pub(super) bounce: Bounce,
    pub(super) engine: Engine,
    pub(super) sector_size: Option<u32>,
    /// Folders below which the storage may be.
    pub(super) paths: Vec<PathBuf>,
    /// Set if the storage may be a server's disk, reached over TCP.
    pub(super) nbd: bool,
    /// Set if a guest has used the storage through an earlier daemon.
    pub(super) in_use: bool,
}

/// Reasons for which storage cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("{}: {source}", path.display())]
    Path { path: PathBuf, source: io::Error },
    /// Path is not below an allowed folder.
    #[error(
        "{} is not below a folder where disks may be: add one to `paths` in [disks] of the \
         configuration (and to `ReadWritePaths` of the unit)",
        path.display()
    )]
    Elsewhere {
        /// Path with all links resolved.
        path: PathBuf,
    },
    /// Configuration allows no NBD servers over TCP.
    #[error(
        "disks of NBD servers are not allowed: set `nbd = true` in [disks] of the configuration"
    )]
    NoServers,
    #[error(transparent)]
    File(#[from] OpenFileError),
    #[error(transparent)]
    Image(ChainError),
    #[error("{address}: {source}")]
    Server { address: NbdAddress, source: io::Error },
    /// The system has no memory or no thread left.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// Opened disk, or the reason for which it cannot be opened.
type Opened = Result<Arc<dyn Disk>, OpenError>;

/// Storage that a thread is opening.
pub(super) struct Opening(Receiver<Opened>);

impl Opening {
    /// Starts the thread. The thread calls `done` after it has sent the result. `rings` serve files.
    pub(super) fn begin(
        request: OpenRequest,
        rings: Arc<UringPool>,
        done: impl FnOnce() + Send + 'static,
    ) -> io::Result<Opening> {
        let (sender, receiver) = channel();
        let open = move || {
            // A device that was removed meanwhile has dropped the receiver.
            let _ = sender.send(open(&request, &rings));
            done();
        };
        std::thread::Builder::new().name("open-disk".to_owned()).spawn(open)?;
        Ok(Opening(receiver))
    }

    /// Returns the result once it is there, and only once.
    pub(super) fn poll(&self) -> Option<Opened> {
        match self.0.try_recv() {
            Ok(opened) => Some(opened),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                Some(Err(io::Error::other("the thread that opens it ended").into()))
            }
        }
    }
}

fn open(request: &OpenRequest, rings: &Arc<UringPool>) -> Opened {
    match &request.source {
        Source::Path(path) => open_file(path, request, rings, false),
        Source::Raw(path) => open_file(path, request, rings, true),
        Source::Image { path, any_folder } => open_image(path, request, *any_folder),
        Source::Nbd(address) => open_server(address, request),
    }
}

impl From<FolderError> for OpenError {
    fn from(error: FolderError) -> OpenError {
        match error {
            FolderError::System { path, source } => OpenError::Path { path, source },
            FolderError::Elsewhere { path } => OpenError::Elsewhere { path },
        }
    }
}

fn file_options(request: &OpenRequest, raw: bool) -> FileOptions {
    FileOptions {
        read_only: request.read_only,
        cache: request.cache,
        bounce: request.bounce,
        engine: request.engine,
        sector_size: request.sector_size,
        discard: request.discard,
        raw,
        in_use: request.in_use,
    }
}

impl From<ChainError> for OpenError {
    fn from(error: ChainError) -> OpenError {
        match error {
            ChainError::Elsewhere { path } => OpenError::Elsewhere { path },
            ChainError::System { path, source } => OpenError::Path { path, source },
            ChainError::File(error) => OpenError::File(error),
            error => OpenError::Image(error),
        }
    }
}

fn open_image(path: &Path, request: &OpenRequest, any_folder: bool) -> Opened {
    let options = ImageOptions { file: file_options(request, false), any_folder };
    let folders = Folders::new(request.paths.clone());
    let chain = OpenChain::open_below(path, &options, &folders)?;
    Ok(Arc::new(serve_chain(chain, options.file, request)?))
}

/// Creates the disk on an open chain.
fn serve_chain(
    chain: OpenChain,
    mut file: FileOptions,
    request: &OpenRequest,
) -> io::Result<QcowDisk> {
    let is_remote_chain = chain.files.iter().any(is_remote);
    if file.bounce == Bounce::Auto && !request.direct_io_safe && is_remote_chain {
        file.bounce = Bounce::Always;
    }
    QcowDisk::new(chain, &file)
}

/// Opens an overlay above the storage `below`, which another disk still has.
///
/// # Errors
///
/// Returns [`OpenError`] also if the overlay is above another file.
pub(super) fn open_above(
    request: &OpenRequest,
    below: &Source,
) -> Result<(Arc<dyn Disk>, BackingLocks), OpenError> {
    let (Source::Image { path, any_folder }, Some(below)) = (&request.source, below.path()) else {
        return Err(io::Error::other("an overlay is an image above a file").into());
    };
    let options = ImageOptions { file: file_options(request, false), any_folder: *any_folder };
    let folders = Folders::new(request.paths.clone());
    let (chain, locks) = OpenChain::open_above(path, &options, Some(&folders))?;
    let below = std::fs::canonicalize(below)?;
    if chain.members.get(1).is_none_or(|member| member.path != below) {
        return Err(io::Error::other(format!(
            "{} is not above {}: another snapshot came first",
            path.display(),
            below.display()
        ))
        .into());
    }
    Ok((Arc::new(serve_chain(chain, options.file, request)?), locks))
}

fn open_file(path: &Path, request: &OpenRequest, rings: &Arc<UringPool>, raw: bool) -> Opened {
    let mut options = file_options(request, raw);
    let folders = Folders::new(request.paths.clone());
    let (file, path) = match folders.open(path, OpenFile::flags(&options)) {
        Ok(opened) => opened,
        Err(FolderError::System { path, source })
            if OpenFile::denies_writing(&source, &options, || {
                folders.open(&path, OpenFile::reading()).is_ok()
            }) =>
        {
            return Err(OpenFileError::NotWritable { path, source }.into());
        }
        Err(error) => return Err(error.into()),
    };
    let file = OpenFile::of(file, &path, &options)?;
    // A network file system may send a page again after its write was reported complete.
    if options.bounce == Bounce::Auto && !request.direct_io_safe && is_remote(&file.file) {
        options.bounce = Bounce::Always;
    }
    Ok(Arc::new(FileDisk::new(file, &options)?.with_rings(Arc::clone(rings))))
}

fn is_remote(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|fs| u64::try_from(fs.f_type).is_ok_and(|id| REMOTE.contains(&id)))
}

fn open_server(address: &NbdAddress, request: &OpenRequest) -> Opened {
    let folders = Folders::new(request.paths.clone());
    match address {
        // This check is for its error message; each connection opens the socket again.
        NbdAddress::Unix { path, .. } => drop(folders.open(path, OFlags::PATH)?),
        NbdAddress::Tcp { .. } if !request.nbd => return Err(OpenError::NoServers),
        NbdAddress::Tcp { .. } => {}
    }
    let options = NbdOptions { read_only: request.read_only, ..NbdOptions::default() };
    let disk = NbdDisk::open_below(address, &options, &folders)
        .map_err(|source| OpenError::Server { address: address.clone(), source })?;
    Ok(Arc::new(disk))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use ringfence_block::storage::qcow2::{MemberFormat, Overlay, OverlaySpec};

    use super::*;

    fn no_rings() -> Arc<UringPool> {
        Arc::new(UringPool::new(0, 1))
    }

    fn opened(request: &OpenRequest) -> Opened {
        open(request, &no_rings())
    }

    fn request(source: Source, paths: &[&Path]) -> OpenRequest {
        OpenRequest {
            source,
            read_only: false,
            discard: true,
            direct_io_safe: false,
            cache: CacheMode::WriteBack,
            bounce: Bounce::Auto,
            engine: Engine::Auto,
            sector_size: None,
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            nbd: false,
            in_use: false,
        }
    }

    #[test]
    fn path_is_checked_against_folders_after_links_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let (here, there) = (dir.path().join("here"), dir.path().join("there"));
        [&here, &there].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        std::fs::write(there.join("disk"), [0; 4096]).unwrap();
        std::os::unix::fs::symlink(there.join("disk"), here.join("link")).unwrap();
        let through = |path: PathBuf, folders: &[&Path]| {
            opened(&request(Source::Path(path), folders)).map(|disk| disk.geometry().bytes)
        };
        let link = here.join("link");
        assert!(matches!(through(link.clone(), &[&here]), Err(OpenError::Elsewhere { .. })));
        assert!(matches!(through(link.clone(), &[]), Err(OpenError::Elsewhere { .. })));
        assert_eq!(through(link, &[&here, &there]).unwrap(), 4096);
        let up = here.join("../there/disk");
        assert!(matches!(through(up, &[&here]), Err(OpenError::Elsewhere { .. })));
        assert!(matches!(through(there.join("none"), &[&there]), Err(OpenError::Path { .. })));
        // A folder whose name only begins alike is another folder.
        let other = dir.path().join("therefore");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("disk"), [0; 4096]).unwrap();
        assert!(matches!(through(other.join("disk"), &[&there]), Err(OpenError::Elsewhere { .. })));
    }

    #[test]
    fn server_outside_allowed_addresses_and_folders_is_refused() {
        let tcp = Source::Nbd("nbd://127.0.0.1:1/x".parse().unwrap());
        let unix = |path: &str| {
            let address = format!("nbd+unix:///?socket={path}");
            Source::Nbd(address.parse().unwrap())
        };
        assert!(matches!(opened(&request(tcp.clone(), &[])), Err(OpenError::NoServers)));
        let refused = opened(&OpenRequest { nbd: true, ..request(tcp, &[]) });
        assert!(matches!(refused, Err(OpenError::Server { .. })));
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let elsewhere = opened(&request(unix(socket.to_str().unwrap()), &[]));
        assert!(matches!(elsewhere, Err(OpenError::Elsewhere { .. })));
    }

    #[test]
    fn image_of_another_format_is_refused_unless_raw_or_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let mut content = vec![0; 4096];
        content[..4].copy_from_slice(b"QFI\xfb");
        std::fs::write(&path, content).unwrap();
        let refused = opened(&request(Source::Path(path.clone()), &[dir.path()]));
        let Err(OpenError::File(OpenFileError::NotRaw { .. })) = refused else {
            panic!("{:?}", refused.err())
        };
        assert!(opened(&request(Source::Raw(path.clone()), &[dir.path()])).is_ok());
        let adopted = OpenRequest { in_use: true, ..request(Source::Path(path), &[dir.path()]) };
        assert!(opened(&adopted).is_ok());
    }

    #[test]
    fn opening_calls_done_after_its_result_is_ready() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [0; 1024]).unwrap();
        let (sender, told) = mpsc::channel();
        let request = request(Source::Path(path), &[dir.path()]);
        let opening =
            Opening::begin(request, no_rings(), move || sender.send(()).unwrap()).unwrap();
        told.recv().unwrap();
        assert_eq!(opening.poll().unwrap().unwrap().geometry().bytes, 1024);
    }

    #[test]
    fn overlay_above_another_file_than_the_disk_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let folder = std::fs::canonicalize(directory.path()).unwrap();
        let [own, other, new] = ["own", "other", "new"].map(|name| folder.join(name));
        [&own, &other].iter().for_each(|path| std::fs::write(path, [0; 8192]).unwrap());
        let (backing, format) = (own.clone(), MemberFormat::Raw);
        let spec = OverlaySpec { path: new.clone(), backing, format, bytes: 8192 };
        Overlay::create(&spec).unwrap().keep();
        let overlay = request(Source::Image { path: new, any_folder: false }, &[&folder]);
        let above = |below: &Path| open_above(&overlay, &Source::Path(below.to_owned())).map(drop);
        assert!(above(&own).is_ok());
        assert!(above(&other).unwrap_err().to_string().contains("another snapshot came first"));
        let elsewhere = OpenRequest { paths: vec!["/nonexistent".into()], ..overlay.clone() };
        let refused = open_above(&elsewhere, &Source::Path(own)).map(drop);
        assert!(matches!(refused, Err(OpenError::Elsewhere { .. })), "{refused:?}");
    }
}
