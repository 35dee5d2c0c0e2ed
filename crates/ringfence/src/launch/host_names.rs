//! The host's files about names, for a guest: `/etc/hosts` and `/etc/resolv.conf`, and their changes.
//!
//! The launcher reads the files with the user's rights and watches them ([`FileWatch`]). After an event it reads both
//! files again and sends what is new to the guest's init ([`ToGuest::Names`]), and new name servers to the uplink. The
//! hosts file goes as a file in memory, because it may be longer than a message.
//!
//! The kernel takes 10 to 30 ms to end a watch. The watch therefore begins some time after the command has started
//! ([`GuestProcesses::settle`]): a command that ends before does not wait.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringfence_sandbox::channel::{Channel, ChannelError};
use rustix::fs::{MemfdFlags, memfd_create};

use super::guest_processes::GuestProcesses;
use super::report::Reporter;
use super::uplink::Uplink;
use ringfence_guest::{GuestConfig, ToGuest};
use ringfence_hostnet::file_watch::FileWatch;
use ringfence_hostnet::host::{RESOLV_CONF, read_name_file, resolver_of_host};
use ringfence_hostnet::interface::ResolverConfig;

const HOSTS: &str = "/etc/hosts";

/// Files about names as the guest knows them.
pub(super) struct HostNames {
    /// Reports changes. `None` before the watch begins, and if the system permits none.
    watch: Option<FileWatch>,
    /// Set unless the options hide the hosts file.
    follows_hosts: bool,
    hosts: Option<Vec<u8>>,
    resolver: Option<ResolverConfig>,
}

impl HostNames {
    /// Returns `None` for a guest that has no files of its own about names.
    pub(super) fn of(config: &GuestConfig) -> Option<HostNames> {
        if config.names.is_none() && config.resolver.is_none() {
            return None;
        }
        let hidden = config.view.hidden.iter().chain(&config.view.empty);
        let follows_hosts = !hidden.into_iter().any(|path| Path::new(HOSTS).starts_with(path));
        Some(HostNames { watch: None, follows_hosts, hosts: None, resolver: None })
    }

    /// Returns the descriptor to poll.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(FileWatch::fd)
    }

    /// Returns `true` if there were events since the last call.
    pub(super) fn may_have_changed(&self) -> bool {
        self.watch.as_ref().is_some_and(FileWatch::may_have_changed)
    }

    /// Starts to watch the files. They may have changed before, so they must be read again.
    pub(super) fn watch(&mut self, reporter: Reporter) {
        match FileWatch::new(&[HOSTS, RESOLV_CONF]) {
            Ok(watch) => self.watch = Some(watch),
            Err(errno) => {
                reporter.step(format_args!("the guest does not follow changes of {HOSTS}: {errno}"))
            }
        }
    }

    /// Sends changes of the files to the guest's init and, if there is one, to the uplink process.
    fn follow(
        &mut self,
        uplink: Option<(&mut Uplink, &Channel)>,
        guest: &Channel,
    ) -> Result<(), ChannelError> {
        self.watch.iter().for_each(FileWatch::renew);
        // A file that is not there is about to be replaced.
        let hosts = self.follows_hosts.then(|| read_name_file(HOSTS)).flatten();
        let hosts = hosts.filter(|text| self.hosts.as_ref() != Some(text));
        let is_there = self.resolver.is_none() || Path::new(RESOLV_CONF).exists();
        let resolver = uplink.filter(|_| is_there).map(|(uplink, channel)| {
            let host = resolver_of_host();
            uplink.follow_name_servers(channel, &host)?;
            Ok::<_, ChannelError>(uplink.resolver_for(host))
        });
        let resolver =
            resolver.transpose()?.filter(|resolver| self.resolver.as_ref() != Some(resolver));
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
    /// Does what can wait until the command has run for some time: unmaps the code of the start, and begins to follow
    /// the host's files about names and the runtime directory.
    pub(super) fn settle(&mut self) {
        ringfence_sys::code::unmap();
        let reporter = self.reporter;
        let names = self.guest.state_mut().and_then(|guest| guest.host_names.as_mut());
        names.into_iter().for_each(|names| names.watch(reporter));
        self.follow_host_names();
        self.watch_presence();
    }

    /// Sends the host's files about names to the guest if they have changed.
    pub(super) fn follow_host_names(&mut self) {
        let Some((state, guest)) = self.guest.with_channel() else { return };
        let Some(names) = &mut state.host_names else { return };
        if let Err(error) = names.follow(self.uplink.with_channel(), guest) {
            self.reporter.step(format_args!("the guest keeps its names as they are: {error}"));
        }
    }
}

/// Returns a file in memory with this text.
fn in_memory(text: &[u8]) -> io::Result<File> {
    let file = File::from(memfd_create("hosts", MemfdFlags::CLOEXEC)?);
    file.write_all_at(text, 0)?;
    Ok(file)
}
