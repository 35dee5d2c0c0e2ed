//! Files of a guest's `/etc` about names, kept up to date.
//!
//! ```text
//! launcher  --- ToGuest::Names: hosts file, resolver --->  init ---> [`NameFiles`] --> /etc/hosts, /etc/resolv.conf
//! stub      --- names of guests on the switch ------------------------^    |
//! stub      <-- name servers, search list ---------------------------------+
//! ```
//!
//! The files lie on a file system in memory, and init keeps them open. A change is written in place, because the files
//! are mounted one by one. A file is written only if its contents change, so what the command wrote to it stays until then.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_hostnet::name_files::{HostsEntry, parse_hosts};

use crate::config::GuestConfig;
use crate::files;
use ringfence_hostnet::interface::ResolverConfig;
use ringfence_sys::numbers::u64_from;

/// A mounted file. Dropping it leaves the file as it is.
#[derive(Debug)]
pub struct MountedFile {
    file: File,
    text: String,
}

impl MountedFile {
    /// Takes a file with the contents `text`.
    pub(super) fn new(file: File, text: String) -> MountedFile {
        MountedFile { file, text }
    }

    fn replace(&mut self, text: String) -> io::Result<()> {
        if self.text != text {
            self.file.write_all_at(text.as_bytes(), 0)?;
            self.file.set_len(u64_from(text.len()))?;
            self.text = text;
        }
        Ok(())
    }
}

/// Files about names, and all that their contents depend on.
#[derive(Debug)]
pub struct NameFiles {
    config: GuestConfig,
    host: Vec<HostsEntry>,
    guests: Vec<String>,
    hosts: Option<MountedFile>,
    resolv_conf: Option<MountedFile>,
    /// Number of changes of the resolver.
    version: u64,
}

/// Handle of the files, for init and for the stub's thread.
#[derive(Clone, Debug)]
pub struct SharedNameFiles(Arc<Mutex<NameFiles>>);

impl SharedNameFiles {
    /// Takes the mounted files. One that could not be mounted is left out.
    pub(super) fn new(
        config: &GuestConfig,
        hosts: Option<MountedFile>,
        resolv_conf: Option<MountedFile>,
    ) -> SharedNameFiles {
        let (config, host, guests) = (config.clone(), Vec::new(), Vec::new());
        let files = NameFiles { config, host, guests, hosts, resolv_conf, version: 0 };
        SharedNameFiles(Arc::new(Mutex::new(files)))
    }

    fn lock(&self) -> MutexGuard<'_, NameFiles> {
        // A panic of the other thread leaves the contents complete.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the host's hosts file and resolver configuration.
    pub(super) fn follow_host(
        &self,
        hosts: Option<&[u8]>,
        resolver: Option<ResolverConfig>,
    ) -> io::Result<()> {
        let mut files = self.lock();
        if let Some(hosts) = hosts {
            files.host = parse_hosts(hosts);
        }
        if resolver.is_some() && resolver != files.config.resolver {
            files.config.resolver = resolver;
            files.version = files.version.wrapping_add(1);
        }
        files.write()
    }

    /// Leaves names of guests out of the host's entries.
    pub fn set_guests(&self, mut guests: Vec<String>) -> io::Result<()> {
        guests.sort();
        let mut files = self.lock();
        if files.guests == guests {
            return Ok(());
        }
        files.guests = guests;
        files.write()
    }

    /// Returns the resolver configuration if it is newer than `version`, which is updated.
    pub fn newer_resolver(&self, version: &mut u64) -> Option<ResolverConfig> {
        let files = self.lock();
        if files.version == *version {
            return None;
        }
        *version = files.version;
        files.config.resolver.clone()
    }
}

impl NameFiles {
    fn write(&mut self) -> io::Result<()> {
        let hosts = files::hosts(&self.config, &self.host, &self.guests);
        let resolv_conf = files::resolv_conf_for(&self.config);
        self.hosts.as_mut().map_or(Ok(()), |file| file.replace(hosts))?;
        self.resolv_conf.as_mut().map_or(Ok(()), |file| file.replace(resolv_conf))
    }
}
