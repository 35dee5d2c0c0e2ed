#![forbid(unsafe_code)]
//! The host as Ringfence's processes find it: its network, its files about names, and where messages go.
//!
//! * [`netlink`]: requests to the kernel about links, addresses and routes; [`host`]: the network that a guest copies.
//! * [`address`], [`interface`]: addresses, interfaces and resolver of a guest.
//! * [`name_files`]: parsers of `hosts(5)` and `resolv.conf(5)`; [`file_watch`]: changes of such files.
//! * [`runtime_dir`]: the directory with a user's sockets; [`guest_sockets`]: those of guests' launchers in it.
//! * [`socket_file`]: listening Unix sockets with files of their own.
//! * [`log`], [`out`], [`text`], [`causes`]: log lines, standard output, and texts of errors.
//!
//! No module depends on the platform or on lent memory. What the kernel or a file says about the host is trusted;
//! what a guest's process writes is cleaned by [`text::printable`] before it reaches a terminal.

pub mod address;
pub mod causes;
pub mod file_watch;
pub mod guest_sockets;
pub mod guest_watch;
pub mod host;
pub mod interface;
pub mod log;
pub mod name_files;
pub mod netlink;
pub mod out;
pub mod runtime_dir;
pub mod socket_file;
pub mod text;
