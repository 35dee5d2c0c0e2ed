//! NBD export of a file or of memory: `export SOCKET PATH|memory:BYTES [CACHE [ENGINE]]`.
//!
//! Useful to measure the export and the storage without a ring between them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "an example")]

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{FileDisk, FileOptions};
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_nbd::export::{Export, ExportOptions};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, what, more @ ..] = args.as_slice() else {
        eprintln!("usage: export SOCKET PATH|memory:BYTES [CACHE [ENGINE]]");
        return;
    };
    let disk: Arc<dyn Disk> = match what.strip_prefix("memory:") {
        Some(bytes) => Arc::new(MemoryDisk::new(bytes.parse().expect("bytes"), 512).unwrap()),
        None => {
            let options = FileOptions {
                cache: more.first().map_or(Ok(Default::default()), |name| name.parse()).unwrap(),
                engine: more.get(1).map_or(Ok(Default::default()), |name| name.parse()).unwrap(),
                ..FileOptions::default()
            };
            Arc::new(FileDisk::open(Path::new(what), &options).unwrap())
        }
    };
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    let _export = Export::start(listener, &disk, ExportOptions::default()).unwrap();
    std::thread::sleep(std::time::Duration::MAX);
}
