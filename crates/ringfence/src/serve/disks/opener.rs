//! Opening the storage of a disk, on a thread of its own.
//!
//! It can take long: a file is locked until the last write of the daemon before is over, a server may
//! not answer, a network's file system may hang. Nobody else is to wait for that.

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
use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};
use rustix::fs::OFlags;

use super::keys::Source;

/// File systems whose files are somewhere else (`linux/magic.h`).
const REMOTE: [u64; 6] = [
    0x6969,      // NFS
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x00C3_6400, // Ceph
    0x5346_414F, // AFS
    0x0102_1997, // 9P
];

/// What to open, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Wish {
    pub(super) source: Source,
    pub(super) read_only: bool,
    pub(super) discard: bool,
    /// The toolstack vouches for it that the storage does not read a page after it was written.
    pub(super) direct_io_safe: bool,
    pub(super) cache: CacheMode,
    pub(super) bounce: Bounce,
    pub(super) sector_size: Option<u32>,
    /// The folders below which it may be.
    pub(super) paths: Vec<PathBuf>,
    /// Whether it may be a server's, over TCP.
    pub(super) nbd: bool,
    /// A guest uses it already, by a daemon before this one.
    pub(super) in_use: bool,
}

/// Why it cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// No such thing.
    #[error("{}: {source}", path.display())]
    Path {
        /// What was named.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The administrator did not allow it.
    #[error(
        "{} is not below a folder where disks may be: add one to `paths` in [disks] of the \
         configuration (and to `ReadWritePaths` of the unit)",
        path.display()
    )]
    Elsewhere {
        /// Where it is, when all links are followed.
        path: PathBuf,
    },
    /// The administrator did not allow servers.
    #[error(
        "disks of NBD servers are not allowed: set `nbd = true` in [disks] of the configuration"
    )]
    NoServers,
    /// The file.
    #[error(transparent)]
    File(#[from] OpenFileError),
    /// The server.
    #[error("{address}: {source}")]
    Server {
        /// Which.
        address: NbdAddress,
        /// Why not.
        source: io::Error,
    },
    /// No memory, no thread.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// An opened disk.
type Opened = Result<Arc<dyn Disk>, OpenError>;

/// One that is being opened.
pub(super) struct Opening(Receiver<Opened>);

impl Opening {
    /// Begins. `done` is called, on the thread, when it is over.
    pub(super) fn begin(wish: Wish, done: impl FnOnce() + Send + 'static) -> io::Result<Opening> {
        let (sender, receiver) = channel();
        let open = move || {
            // A device that went meanwhile does not want it any more.
            let _ = sender.send(open(&wish));
            done();
        };
        std::thread::Builder::new().name("open-disk".to_owned()).spawn(open)?;
        Ok(Opening(receiver))
    }

    /// What came of it, once.
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

fn open(wish: &Wish) -> Opened {
    match &wish.source {
        Source::Path(path) => open_file(path, wish, false),
        Source::Raw(path) => open_file(path, wish, true),
        Source::Nbd(address) => open_server(address, wish),
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

fn open_file(path: &Path, wish: &Wish, raw: bool) -> Opened {
    let mut options = FileOptions {
        read_only: wish.read_only,
        cache: wish.cache,
        bounce: wish.bounce,
        // A ring of io_uring does I/O behind the back of the sandbox's filter, so none may be made.
        engine: Engine::Threads,
        sector_size: wish.sector_size,
        discard: wish.discard,
        raw,
        in_use: wish.in_use,
    };
    let folders = Folders::new(wish.paths.clone());
    let (file, path) = folders.open(path, OpenFile::flags(&options))?;
    let file = OpenFile::of(file, &path, &options)?;
    // A network's file system may send a page once more when the guest has it back already.
    if options.bounce == Bounce::Auto && !wish.direct_io_safe && is_remote(&file.file) {
        options.bounce = Bounce::Always;
    }
    Ok(Arc::new(FileDisk::new(file, &options)?))
}

fn is_remote(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|fs| u64::try_from(fs.f_type).is_ok_and(|id| REMOTE.contains(&id)))
}

fn open_server(address: &NbdAddress, wish: &Wish) -> Opened {
    let folders = Folders::new(wish.paths.clone());
    match address {
        // Found out here for its message; each connection opens the socket anew.
        NbdAddress::Unix { path, .. } => drop(folders.open(path, OFlags::PATH)?),
        NbdAddress::Tcp { .. } if !wish.nbd => return Err(OpenError::NoServers),
        NbdAddress::Tcp { .. } => {}
    }
    let options = NbdOptions { read_only: wish.read_only, ..NbdOptions::default() };
    let disk = NbdDisk::open_below(address, &options, &folders)
        .map_err(|source| OpenError::Server { address: address.clone(), source })?;
    Ok(Arc::new(disk))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn wish(source: Source, paths: &[&Path]) -> Wish {
        Wish {
            source,
            read_only: false,
            discard: true,
            direct_io_safe: false,
            cache: CacheMode::WriteBack,
            bounce: Bounce::Auto,
            sector_size: None,
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            nbd: false,
            in_use: false,
        }
    }

    #[test]
    fn what_is_allowed_is_where_it_really_is() {
        let dir = tempfile::tempdir().unwrap();
        let (here, there) = (dir.path().join("here"), dir.path().join("there"));
        [&here, &there].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        std::fs::write(there.join("disk"), [0; 4096]).unwrap();
        std::os::unix::fs::symlink(there.join("disk"), here.join("link")).unwrap();
        let through = |path: PathBuf, folders: &[&Path]| {
            open(&wish(Source::Path(path), folders)).map(|disk| disk.geometry().bytes)
        };
        let link = here.join("link");
        assert!(matches!(through(link.clone(), &[&here]), Err(OpenError::Elsewhere { .. })));
        assert!(matches!(through(link.clone(), &[]), Err(OpenError::Elsewhere { .. })));
        assert_eq!(through(link, &[&here, &there]).unwrap(), 4096);
        let up = here.join("../there/disk");
        assert!(matches!(through(up, &[&here]), Err(OpenError::Elsewhere { .. })));
        assert!(matches!(through(there.join("none"), &[&there]), Err(OpenError::Path { .. })));
        // A folder whose name begins alike is another one.
        let other = dir.path().join("therefore");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("disk"), [0; 4096]).unwrap();
        assert!(matches!(through(other.join("disk"), &[&there]), Err(OpenError::Elsewhere { .. })));
    }

    #[test]
    fn servers_are_asked_only_where_they_may_be() {
        let tcp = Source::Nbd("nbd://127.0.0.1:1/x".parse().unwrap());
        let unix = |path: &str| {
            let address = format!("nbd+unix:///?socket={path}");
            Source::Nbd(address.parse().unwrap())
        };
        assert!(matches!(open(&wish(tcp.clone(), &[])), Err(OpenError::NoServers)));
        let refused = open(&Wish { nbd: true, ..wish(tcp, &[]) });
        assert!(matches!(refused, Err(OpenError::Server { .. })));
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let elsewhere = open(&wish(unix(socket.to_str().unwrap()), &[]));
        assert!(matches!(elsewhere, Err(OpenError::Elsewhere { .. })));
    }

    #[test]
    fn image_of_another_format_is_refused_unless_raw_or_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let mut content = vec![0; 4096];
        content[..4].copy_from_slice(b"QFI\xfb");
        std::fs::write(&path, content).unwrap();
        let refused = open(&wish(Source::Path(path.clone()), &[dir.path()]));
        let Err(OpenError::File(OpenFileError::NotRaw { .. })) = refused else {
            panic!("{:?}", refused.err())
        };
        assert!(open(&wish(Source::Raw(path.clone()), &[dir.path()])).is_ok());
        let adopted = Wish { in_use: true, ..wish(Source::Path(path), &[dir.path()]) };
        assert!(open(&adopted).is_ok());
    }

    #[test]
    fn whoever_waits_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [0; 1024]).unwrap();
        let (sender, told) = mpsc::channel();
        let wish = wish(Source::Path(path), &[dir.path()]);
        let opening = Opening::begin(wish, move || sender.send(()).unwrap()).unwrap();
        told.recv().unwrap();
        assert_eq!(opening.poll().unwrap().unwrap().geometry().bytes, 1024);
    }
}
