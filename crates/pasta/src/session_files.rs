//! Files that the options of a session name: process id, capture, and sockets for clients.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use ringfence_link::capture::file_header;

use super::args::PastaArgs;
use super::control::ControlServer;
use super::machine::Endpoint;
use super::network::{self, PlannedNetwork};
use super::session_status::{SessionNames, StatusServer};
use super::target::Target;

/// Files that the options name, created with the user's rights.
pub(crate) struct Files {
    pub(crate) pid: Option<File>,
    pub(crate) control: Option<ControlServer>,
    /// File for captured packets.
    pub(crate) capture: Option<OwnedFd>,
    /// State of the session, with the socket at which it is read.
    pub(crate) status: StatusServer,
}

impl Files {
    pub(crate) fn create(
        args: &PastaArgs,
        target: &Target,
        network: &PlannedNetwork,
        listeners: &network::Listeners,
    ) -> anyhow::Result<Files> {
        let pid = args.pid.as_deref().map(create_pid_file).transpose()?;
        let bind = |path: &std::path::PathBuf| {
            let mut server = ControlServer::bind(path, args, network.addresses())?;
            server.take_first(args, listeners);
            Ok::<_, anyhow::Error>(server)
        };
        let control = args.conf_path.as_ref().map(bind).transpose()?;
        let capture = args.pcap.as_deref().map(create_capture).transpose()?;
        let names = SessionNames {
            program: target.program(),
            guest: target.record_name(),
            process: "the uplink's process",
            link: target.endpoint().map_or("tap", Endpoint::link_name),
        };
        let status = StatusServer::new(args.status_socket.as_deref(), names)?;
        Ok(Files { pid, control, capture, status })
    }
}

fn create_pid_file(path: &Path) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o644);
    options.open(path).with_context(|| format!("--pid {}", path.display()))
}

/// Creates the file for captured packets, with its header. Other users cannot read it.
fn create_capture(path: &Path) -> anyhow::Result<OwnedFd> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let made = options.open(path).and_then(|mut file| {
        file.write_all(&file_header())?;
        Ok(file)
    });
    Ok(made.with_context(|| format!("--pcap {}", path.display()))?.into())
}

/// Writes the process id.
pub(crate) fn write_pid(file: Option<File>) -> anyhow::Result<()> {
    let Some(mut file) = file else { return Ok(()) };
    let line = format!("{}\n", std::process::id());
    file.write_all(line.as_bytes()).context("--pid: writing the process id")
}
