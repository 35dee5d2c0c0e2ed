//! Driver domain of a switch, for guests of `ringfence run`.
//!
//! | thread | work |
//! |---|---|
//! | hub | stands for the hypervisor and xenstored |
//! | workers (`dataplane`) | poll ports and move frames |
//! | control (main thread) | toolstack: serves launchers, follows the xenbus state of each device |
//!
//! The process starts with one thread. It receives its configuration and the listening socket,
//! enters the sandbox and starts the other threads. Only then it reads from launchers and guests.
//! It ends when the last guest has left.
//!
//! The control thread serves all launchers and must not block on one. A connection that does not
//! read its messages is closed. Disks are torn down on other threads, and
//! [`ringfence_sys::descriptors`] closes descriptors of messages.
//!
//! | module        | contents                                                        |
//! |---------------|-----------------------------------------------------------------|
//! | [`process`]   | main function: sandbox, threads, end                            |
//! | `domain`      | guests, lifetime, part in the loop of `control` |
//! | `requests`    | requests of launchers: attach, host's port, disks, counters     |
//! | `launcher`    | a launcher's connection and its time limits                     |
//! | `admission`   | proof that a connection is a launcher's                         |
//! | [`addresses`] | address plan                                                    |
//! | `nodes`       | store nodes of a vif                                            |
//! | `media`       | disks on files and on connections that launchers opened         |

pub mod addresses;
mod admission;
mod domain;
pub mod error;
mod launcher;
pub(crate) mod media;
mod nodes;
pub mod process;
mod requests;
#[cfg(test)]
mod tests;
