//! Control socket of `vhost-user blk`: `ringfence disk resize PATH` lets a virtual machine have a disk that was enlarged.
//!
//! ```text
//! client ── ResizeDisk ──> session: enlarges the file, or measures it ── ToDisk::Resize ──> disk process
//!        <─ DiskChanged ──                                            <─ FromDisk::Resized ──
//! ```
//!
//! Requests and replies are those of a launcher ([`crate::commands`]). One client at a time is served; the next one waits in
//! the socket's queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::Context;
use ringfence_driver::machine::ToDisk;
use ringfence_hostnet::socket_file::{SocketFile, listen_at};
use ringfence_hostnet::text::printable;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::channel::Channel;
use rustix::net::{SocketFlags, SocketType};

use crate::commands::{Reply, Request};
use crate::launch::disk_changes::new_size;
use crate::launch::served_file::{ServedFile, Storage};

/// Listening socket, and its client.
pub(super) struct ControlServer {
    listener: OwnedFd,
    /// File of the socket, removed at the end.
    _file: SocketFile,
    client: Option<Channel>,
    /// Size that the disk process is about to take.
    pending: Option<u64>,
}

impl ControlServer {
    /// Creates the socket, for this user alone.
    ///
    /// # Errors
    ///
    /// Returns an error that names the option.
    pub(super) fn new(path: &Path) -> anyhow::Result<ControlServer> {
        let named = || format!("--control {}", path.display());
        let (listener, file) = listen_at(path, SocketType::SEQPACKET).with_context(named)?;
        Ok(ControlServer { listener, _file: file, client: None, pending: None })
    }

    /// Returns the descriptors to wait for.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let client = self.client.as_ref().map(AsFd::as_fd);
        std::iter::once(client.unwrap_or(self.listener.as_fd())).filter(|_| self.pending.is_none())
    }

    /// Accepts a client, and begins what it requests.
    pub(super) fn serve(&mut self, storage: &mut Storage, device: &Channel) {
        if self.pending.is_some() {
            return;
        }
        if self.client.is_none() {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            // A client that has gone meanwhile needs no answer.
            let accepted = rustix::net::accept_with(&self.listener, flags);
            self.client = accepted.ok().map(Channel::from_fd);
        }
        let Some(client) = &self.client else { return };
        let request = match client.try_receive::<Request>() {
            Ok(None) => return,
            Ok(Some((request, _))) => request,
            Err(_) => {
                self.client = None;
                return;
            }
        };
        let begun = match request {
            Request::ResizeDisk { bytes, .. } => begin(storage, bytes, device),
            _ => Err("this socket is for `ringfence disk resize`".to_owned()),
        };
        match begun {
            Ok(bytes) => self.pending = Some(bytes),
            Err(why) => self.reply(&failed(why)),
        }
    }

    /// Answers the client of a change that the disk process has made, or refused.
    pub(super) fn finish(&mut self, storage: &mut Storage, problem: Option<String>) {
        let Some(bytes) = self.pending.take() else { return };
        let reply = match (problem, storage) {
            (None, Storage::File(ServedFile { facts, .. })) => {
                facts.bytes = bytes;
                Reply::DiskChanged { bytes }
            }
            (problem, _) => failed(printable(&problem.unwrap_or_default())),
        };
        self.reply(&reply);
    }

    /// Ends a change whose process has ended: the next process has the size that the file has.
    pub(super) fn abandon(&mut self) {
        if self.pending.take().is_some() {
            self.reply(&failed("the disk process has ended: try again".to_owned()));
        }
    }

    fn reply(&mut self, reply: &Reply) {
        // A client that does not read, or has gone, needs no answer. Each has one request.
        if let Some(client) = self.client.take() {
            let _ = client.send_now(reply, &[]);
        }
    }
}

/// Enlarges or measures the file of a disk, and orders the disk process to take its size. Returns the size.
fn begin(storage: &mut Storage, bytes: Option<u64>, device: &Channel) -> Result<u64, String> {
    let served = match storage {
        Storage::File(served) => served,
        Storage::Server(address) => {
            return Err(format!("the disk is on the server {address}, which alone can change it"));
        }
    };
    let bytes = new_size(served, bytes)?;
    let sent: Result<(), io::Error> =
        device.send_now(&ToDisk::Resize { bytes }, &[]).map_err(io::Error::other);
    sent.map_err(|error| format!("the disk process: {error}"))?;
    Ok(bytes)
}

fn failed(why: String) -> Reply {
    Reply::Failed { status: STATUS_FAILED, why }
}
