//! Capture of a link's frames into a file, in the format of libpcap (draft-ietf-opsawg-pcap).
//!
//! The file was opened elsewhere, and already has its header ([`file_header`]). Each frame is one record: time, length,
//! and the bytes as they pass the link. So super-packets are not segmented, and checksums that the link leaves blank are
//! blank. One `write` adds one record. A capture ends, with a message in the log, when the file has [`SIZE_MAX`] bytes or
//! cannot be written; packets are carried on.

// #syscall uplink write: frames that are captured

use std::os::fd::OwnedFd;
use std::time::{SystemTime, UNIX_EPOCH};

use ringfence_frame::Batch;
use ringfence_sys::numbers::bounded;

/// Maximum size of the file in bytes. The guest decides how fast it grows.
pub const SIZE_MAX: u64 = 1 << 30;

/// Length of the file's header, and of a record's, in bytes.
const FILE_HEADER_LEN: usize = 24;
const RECORD_HEADER_LEN: usize = 16;
/// Magic number of files with microseconds.
const MAGIC: u32 = 0xa1b2_c3d4;
/// Maximum length of a record's bytes: the longest frame of a link.
const SNAPSHOT_LEN: u32 = 1 << 17;
/// Link type of Ethernet frames.
const ETHERNET: u32 = 1;

/// Returns the header of a file.
pub fn file_header() -> [u8; FILE_HEADER_LEN] {
    let mut header = [0; FILE_HEADER_LEN];
    // Version 2.4; time zone and accuracy are zero in all files.
    for (at, field) in
        [(0, MAGIC), (4, 4 << 16 | 2), (8, 0), (12, 0), (16, SNAPSHOT_LEN), (20, ETHERNET)]
    {
        header[at..at + 4].copy_from_slice(&u32::to_le_bytes(field));
    }
    header
}

/// File to which frames are written. See the [module](self).
#[derive(Debug)]
pub struct Capture {
    /// `None` once the capture has ended.
    file: Option<OwnedFd>,
    /// Number of bytes that the file may still grow.
    left: u64,
}

impl Capture {
    /// Creates a capture into a file that has a header and nothing else.
    pub fn new(file: OwnedFd) -> Capture {
        Capture::of_size(file, SIZE_MAX)
    }

    fn of_size(file: OwnedFd, size: u64) -> Capture {
        Capture { file: Some(file), left: size.saturating_sub(FILE_HEADER_LEN as u64) }
    }

    /// Adds the frames of a batch that were received now: those from number `first` on.
    pub fn record_received(&mut self, batch: &Batch, first: usize) {
        for index in first..batch.len() {
            let Some(frame) = u32::try_from(index).ok().and_then(|index| batch.get(index)) else {
                return;
            };
            self.record(frame.len(), |bytes| {
                frame.copy_to(bytes);
            });
        }
    }

    /// Adds a frame of `len` bytes that passes now. `fill` writes its bytes.
    pub fn record(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        let Some(file) = &self.file else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut record = vec![0; RECORD_HEADER_LEN + len];
        fill(&mut record[RECORD_HEADER_LEN..]);
        let len = bounded(len, u32::MAX);
        // Seconds are unsigned, and last until 2106.
        let seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        for (at, field) in [(0, seconds), (4, now.subsec_micros()), (8, len), (12, len)] {
            record[at..at + 4].copy_from_slice(&u32::to_le_bytes(field));
        }
        let Some(left) = self.left.checked_sub(record.len() as u64) else {
            return self.end("the file has its maximum size");
        };
        match rustix::io::write(file, &record) {
            Ok(written) if written == record.len() => self.left = left,
            Ok(_) => self.end("the file system is full"),
            Err(errno) => self.end(errno),
        }
    }

    fn end(&mut self, why: impl core::fmt::Display) {
        tracing::warn!("packets are no longer captured: {why}");
        self.file = None;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn field(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn records_follow_the_header() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&file_header()).unwrap();
        let mut capture = Capture::new(file.reopen_at_end());
        capture.record(3, |bytes| bytes.copy_from_slice(b"abc"));
        capture.record(4, |bytes| bytes.copy_from_slice(b"defg"));
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(field(&bytes, 0), 0xa1b2_c3d4);
        assert_eq!((bytes[4], bytes[6], field(&bytes, 20)), (2, 4, 1));
        assert_eq!((field(&bytes, 32), field(&bytes, 36), &bytes[40..43]), (3, 3, &b"abc"[..]));
        assert_eq!((field(&bytes, 51), &bytes[59..]), (4, &b"defg"[..]));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(now - u64::from(field(&bytes, 24)) < 60);
    }

    #[test]
    fn file_does_not_grow_beyond_the_maximum() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&file_header()).unwrap();
        let mut capture = Capture::of_size(file.reopen_at_end(), 100);
        for _ in 0..10 {
            capture.record(20, |bytes| bytes.fill(7));
        }
        // Two records of 36 bytes fit.
        assert_eq!(file.path().metadata().unwrap().len(), 24 + 2 * 36);
    }

    #[test]
    fn file_that_cannot_be_written_ends_the_capture() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut capture = Capture::new(full.into());
        capture.record(1, |bytes| bytes.fill(0));
        assert!(capture.file.is_none());
    }

    trait AtEnd {
        fn reopen_at_end(&self) -> OwnedFd;
    }

    impl AtEnd for tempfile::NamedTempFile {
        fn reopen_at_end(&self) -> OwnedFd {
            std::fs::File::options().append(true).open(self.path()).unwrap().into()
        }
    }
}
