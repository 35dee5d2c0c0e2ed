//! Block device nodes below /dev for a guest's disks, if the kernel has the driver `nbd` and the
//! user is root.
//!
//! The kernel is another client of the frontend's NBD export. The launcher performs the handshake
//! and passes the connection to a device, which occupies a thread of the launcher. The device
//! therefore ends with the launcher. When the guest ends, the launcher flushes and ends the device
//! before its frontend.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringfence_nbd::protocol::agree::{ClientHandshake, ClientProgress, Negotiated};
use ringfence_sys::nbd::{NbdDevice, NbdEnding, NbdExport, is_ready};

/// Time limit for the handshake and for the node to appear.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a request. The disk's own limits are shorter.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(180);
/// Block sizes that the kernel accepts.
const BLOCK_SIZES: std::ops::RangeInclusive<u32> = 512..=4096;

/// Node of a disk below /dev. Dropping it ends the device; [`Device::end`] also returns the result.
pub(super) struct Device {
    path: PathBuf,
    ending: NbdEnding,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Creates a node for the disk that is exported at `socket`. Returns `None` if the kernel has
    /// no driver or this user is not root.
    ///
    /// # Errors
    ///
    /// Fails if handshake or device fail.
    pub(super) fn of(socket: &Path) -> io::Result<Option<Device>> {
        if !NbdDevice::exist() || !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let (stream, settled) = perform_handshake(socket)?;
        let (told, result) = channel();
        // The kernel requires one thread for all of it.
        let thread = std::thread::Builder::new()
            .name("nbd".to_owned())
            .spawn(move || serve(&stream, &settled, &told))?;
        let gone = || io::Error::other("the thread of the device ended");
        let (path, ending) = result.recv_timeout(IO_TIMEOUT).map_err(|_| gone())??;
        let device = Device { path, ending, thread: Some(thread) };
        let until = Instant::now() + IO_TIMEOUT;
        while !is_ready(&device.path) {
            if Instant::now() > until || device.thread.as_ref().is_none_or(JoinHandle::is_finished)
            {
                return Err(io::Error::other(format!("{} was not ready", device.path.display())));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Some(device))
    }

    /// Returns the path of the node.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the kernel's dirty data to the disk and ends the device.
    ///
    /// # Errors
    ///
    /// Fails if data could not be written. The device has ended then, too.
    pub(super) fn end(mut self) -> io::Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let written = self.ending.end();
        // A panic of the thread needs no handling: it shares no state.
        let _ = thread.join();
        written
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A device that fails here belongs to a guest that was not started.
        let _ = self.finish();
    }
}

type Taken = io::Result<(PathBuf, NbdEnding)>;

/// Runs the device until it ends.
fn serve(stream: &UnixStream, settled: &Negotiated, told: &Sender<Taken>) {
    let export = NbdExport {
        bytes: settled.offer.bytes,
        block_size: settled.offer.block_min.clamp(*BLOCK_SIZES.start(), *BLOCK_SIZES.end()),
        flags: settled.offer.flags,
        timeout: REQUEST_TIMEOUT,
    };
    let taken = NbdDevice::take(stream.as_fd(), &export);
    let (device, answer) = match taken.and_then(|device| Ok((device.ending()?, device))) {
        Ok((ending, device)) => {
            let path = device.path().to_owned();
            (Some(device), Ok((path, ending)))
        }
        Err(error) => (None, Err(error)),
    };
    let waited_for = told.send(answer).is_ok();
    if let Some(device) = device.filter(|_| waited_for)
        && let Err(error) = device.serve()
    {
        tracing::warn!(%error, path = %device.path().display(), "a disk's device ended");
    }
}

/// Performs the handshake with the export, with the features that the kernel knows: simple replies
/// only.
fn perform_handshake(socket: &Path) -> io::Result<(UnixStream, Negotiated)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    let mut handshake = ClientHandshake::new("", false).map_err(io::Error::other)?.simple();
    let (mut held, mut out, mut buffer) = (Vec::new(), Vec::new(), [0; 512]);
    loop {
        let (used, progress) = handshake.feed(&held, &mut out).map_err(io::Error::other)?;
        held.drain(..used);
        stream.write_all(&out)?;
        out.clear();
        match progress {
            ClientProgress::Ready(settled) => {
                if !held.is_empty() {
                    return Err(io::Error::other("the frontend answers what was not asked"));
                }
                stream.set_read_timeout(None)?;
                stream.set_write_timeout(None)?;
                return Ok((stream, settled));
            }
            ClientProgress::StartTls => return Err(io::Error::other("nobody asked to encrypt")),
            ClientProgress::More if used > 0 => {}
            ClientProgress::More => match stream.read(&mut buffer)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => held.extend_from_slice(&buffer[..count]),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;

    use ringfence_block::storage::Disk;
    use ringfence_block::storage::memory::MemoryDisk;
    use ringfence_nbd::export::{Export, ExportOptions};

    use super::*;

    #[test]
    fn handshake_returns_the_offer_and_simple_replies() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(1 << 20, 4096).unwrap());
        let listener = UnixListener::bind(&path).unwrap();
        let _export = Export::start(listener, &disk, ExportOptions::default()).unwrap();
        let (mut stream, settled) = perform_handshake(&path).unwrap();
        assert_eq!((settled.offer.bytes, settled.offer.block_min), (1 << 20, 4096));
        assert!(!settled.structured);
        // A read of the first block, as the kernel requests it.
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0; 4]);
        request.extend(77u64.to_be_bytes());
        request.extend(0u64.to_be_bytes());
        request.extend(4096u32.to_be_bytes());
        stream.write_all(&request).unwrap();
        let mut answer = vec![1; 16 + 4096];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(answer[8..16], 77u64.to_be_bytes());
        assert!(answer[16..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn handshake_without_answer_times_out() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || drop(listener.accept().unwrap()));
        assert!(perform_handshake(&path).is_err());
        server.join().unwrap();
    }
}
