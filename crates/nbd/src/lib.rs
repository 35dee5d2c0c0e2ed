#![forbid(unsafe_code)]
//! Network block devices (NBD): disks on NBD servers, and disks exported to NBD clients.
//!
//! * [`protocol`]: encoding and validation of NBD messages, without I/O.
//! * [`client`]: disk on an NBD server, as storage ([`client::NbdDisk`]).
//! * [`export`]: NBD server for local programs ([`export::Export`]).
//!
//! ```
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! use ringfence_block::storage::Disk;
//! use ringfence_block::storage::memory::MemoryDisk;
//! use ringfence_nbd::client::{NbdDisk, NbdOptions};
//! use ringfence_nbd::export::{Export, ExportOptions};
//!
//! # let directory = std::env::temp_dir().join(format!("ringfence-nbd-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&directory)?;
//! let socket = directory.join("disk");
//! let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(1 << 20, 512)?);
//! let export = Export::start(UnixListener::bind(&socket)?, &disk, ExportOptions::default())?;
//! let address = format!("nbd+unix:///?socket={}", socket.display()).parse()?;
//! let remote = NbdDisk::open(&address, &NbdOptions::default())?;
//! assert_eq!(remote.geometry().bytes, 1 << 20);
//! # drop((remote, export));
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod client;
pub mod export;
pub mod protocol;
