//! Program that answers at a Unix socket: JSON lines in both directions.
//!
//! The asker connects when there is a question, and keeps the connection. The program must run as the user that started the
//! asker, or as root, and in no container ([`peer_is_in_no_container`]): a command in a guest may make a socket of the same name,
//! and must not answer its own questions.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::Context;
use ringfence_sys::socket::{peer_is_in_no_container, peer_user};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::question::{AnswerLine, AnswerWord};

/// Maximum length of a line in bytes.
const LINE_MAX: usize = 4096;
/// Maximum number of answers that are read at a time.
const ANSWERS_MAX: usize = 64;

/// Connection to the program.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    read: Vec<u8>,
}

/// Program of one guest.
#[derive(Debug)]
pub(super) struct Approver {
    /// Absolute path: the asker may leave its directory.
    path: PathBuf,
    /// User that started the asker, which may give up root's rights later.
    user: u32,
    connection: Option<Connection>,
}

impl Approver {
    /// # Errors
    ///
    /// Returns the reason for which the current directory is unknown.
    pub(super) fn new(path: &Path) -> anyhow::Result<Approver> {
        let path = std::path::absolute(path).context("--ask: the current directory")?;
        let user = rustix::process::geteuid().as_raw();
        Ok(Approver { path, user, connection: None })
    }

    fn connect(&self) -> Result<Connection, String> {
        let error = |errno: Errno| {
            let error = io::Error::from(errno);
            format!("--ask socket:{}: nobody answers: {error}", self.path.display())
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(error)?;
        let address = SocketAddrUnix::new(&self.path).map_err(error)?;
        rustix::net::connect(&socket, &address).map_err(error)?;
        let is_trusted = peer_user(&socket).is_ok_and(|user| user == self.user || user == 0)
            && peer_is_in_no_container(&socket);
        if !is_trusted {
            return Err(format!(
                "--ask socket:{}: its program is of another user or in a container, and may not answer",
                self.path.display()
            ));
        }
        Ok(Connection { socket, read: Vec::new() })
    }

    /// Sends a line. Connects first if necessary.
    ///
    /// # Errors
    ///
    /// Returns a message for the user. A program that does not read is disconnected.
    pub(super) fn send(&mut self, line: &str) -> Result<(), String> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect()?,
        };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&connection.socket, line.as_bytes(), flags) {
            Ok(sent) if sent == line.len() => {
                self.connection = Some(connection);
                Ok(())
            }
            _ => Err(format!(
                "--ask socket:{}: its program does not read questions",
                self.path.display()
            )),
        }
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(|connection| connection.socket.as_fd())
    }

    /// Returns answers with the ids of their questions, and a message if the connection has ended.
    pub(super) fn take_answers(&mut self) -> (Vec<(String, AnswerWord)>, Option<String>) {
        let mut answers = Vec::new();
        let Some(connection) = &mut self.connection else { return (answers, None) };
        let mut ended = None;
        while answers.len() < ANSWERS_MAX && ended.is_none() {
            let mut bytes = [0; LINE_MAX];
            match rustix::net::recv(&connection.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => ended = Some("its program has closed the connection"),
                Ok((count, _)) => connection.read.extend_from_slice(&bytes[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => ended = Some("the connection is lost"),
            }
            while let Some(end) = connection.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = connection.read.drain(..=end).collect();
                match serde_json::from_slice::<AnswerLine>(&line) {
                    Ok(line) => answers.push((line.question, line.answer)),
                    Err(_) => ended = Some("its program sent a line that is no answer"),
                }
            }
            if connection.read.len() > LINE_MAX {
                ended = Some("its program sent a line that is too long");
            }
        }
        let message = ended.map(|why| {
            self.connection = None;
            format!("--ask socket:{}: {why}", self.path.display())
        });
        (answers, message)
    }
}
