//! The host's files about names, for a guest: `/etc/hosts` and `/etc/resolv.conf`, and their changes.
//!
//! The launcher reads the files with the user's rights and watches them by inotify: each file, and the directory in which
//! a new one may replace it. After an event it reads both files again and sends what is new to the guest's init
//! ([`ToGuest::Names`]). The hosts file goes as a file in memory, because it may be longer than a message.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ringfence_sandbox::channel::{Channel, ChannelError};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{MemfdFlags, memfd_create};

use super::guest_processes::GuestProcesses;
use super::report::Reporter;
use super::uplink::Uplink;
use crate::guest::{GuestConfig, ResolverConfig, ToGuest};
use crate::uplink::host::{read_name_file, resolver_of_host};

const HOSTS: &str = "/etc/hosts";
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Files about names as the guest knows them.
pub(super) struct HostNames {
    /// Reports changes. `None` if the system permits no watch.
    watch: Option<OwnedFd>,
    /// Set unless the options hide the hosts file.
    follows_hosts: bool,
    hosts: Option<Vec<u8>>,
    resolver: Option<ResolverConfig>,
}

impl HostNames {
    /// Starts to watch the files. Returns `None` for a guest that has no files of its own about names.
    pub(super) fn of(config: &GuestConfig, reporter: Reporter) -> Option<HostNames> {
        if config.names.is_none() && config.resolver.is_none() {
            return None;
        }
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        if let Err(errno) = watch {
            reporter.step(format_args!("the guest does not follow changes of {HOSTS}: {errno}"));
        }
        let hidden = config.view.hidden.iter().chain(&config.view.empty);
        let follows_hosts = !hidden.into_iter().any(|path| Path::new(HOSTS).starts_with(path));
        let names = HostNames { watch: watch.ok(), follows_hosts, hosts: None, resolver: None };
        names.watch_files();
        Some(names)
    }

    /// Watches the files that are there now.
    fn watch_files(&self) {
        let Some(watch) = &self.watch else { return };
        let of_file = WatchFlags::CLOSE_WRITE | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        let of_directory = WatchFlags::CREATE | WatchFlags::MOVED_TO;
        for file in [HOSTS, RESOLV_CONF] {
            // A file or directory that is not there has no changes. A watch that exists is renewed.
            let _ = inotify::add_watch(watch, file, of_file);
            for directory in directories(Path::new(file)) {
                let _ = inotify::add_watch(watch, directory, of_directory);
            }
        }
    }

    /// Returns the descriptor to poll.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AsFd::as_fd)
    }

    /// Returns `true` if there were events since the last call.
    pub(super) fn may_have_changed(&self) -> bool {
        let mut events = [0; 4096];
        let mut next = || self.watch.as_ref().map(|watch| rustix::io::read(watch, &mut events));
        let mut changed = false;
        while let Some(Ok(1..)) = next() {
            changed = true;
        }
        changed
    }

    /// Sends what has changed to the guest's init.
    pub(super) fn follow(
        &mut self,
        uplink: Option<&Uplink>,
        guest: &Channel,
    ) -> Result<(), ChannelError> {
        self.watch_files();
        // A file that is not there is about to be replaced.
        let hosts = self.follows_hosts.then(|| read_name_file(HOSTS)).flatten();
        let hosts = hosts.filter(|text| self.hosts.as_ref() != Some(text));
        let is_there = self.resolver.is_none() || Path::new(RESOLV_CONF).exists();
        let resolver = uplink.filter(|_| is_there).map(|up| up.resolver_for(resolver_of_host()));
        let resolver = resolver.filter(|resolver| self.resolver.as_ref() != Some(resolver));
        if hosts.is_none() && resolver.is_none() {
            return Ok(());
        }
        let file = hosts.as_deref().map(in_memory).transpose()?;
        let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        let order = ToGuest::Names { hosts: hosts.is_some(), resolver: resolver.clone() };
        guest.send(&order, &fds)?;
        self.hosts = hosts.or(self.hosts.take());
        self.resolver = resolver.or(self.resolver.take());
        Ok(())
    }
}

impl GuestProcesses<'_> {
    /// Sends the host's files about names to the guest if they have changed.
    pub(super) fn follow_host_names(&mut self) {
        let Some(mut names) = self.host_names.take() else { return };
        let guest = self.guest.as_ref().map(|guest| guest.domain.channel());
        let followed = guest.map_or(Ok(()), |guest| names.follow(self.uplink(), guest));
        if let Err(error) = followed {
            self.reporter.step(format_args!("the guest keeps its names as they are: {error}"));
        }
        self.host_names = Some(names);
    }
}

/// Returns the directory of a path, and that of the file to which it leads.
fn directories(path: &Path) -> Vec<PathBuf> {
    let target = path.canonicalize().ok();
    let paths = [Some(path), target.as_deref()].into_iter().flatten();
    paths.filter_map(|path| path.parent().map(Path::to_owned)).collect()
}

/// Returns a file in memory with this text.
fn in_memory(text: &[u8]) -> io::Result<File> {
    let file = File::from(memfd_create("hosts", MemfdFlags::CLOEXEC)?);
    file.write_all_at(text, 0)?;
    Ok(file)
}
