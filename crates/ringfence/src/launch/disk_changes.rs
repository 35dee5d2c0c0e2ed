//! Changes of a disk that the guest uses: a snapshot, and another size (`ringfence disk`).
//!
//! ```text
//! client                         launcher                       driver domain
//!   creates the overlay, opens
//!   and locks its chain
//!   Snapshot + files ──────────> checks that the files below
//!                                the overlay are the disk's
//!                                Snapshot + files ────────────>  drains, flushes, replaces
//!                                locks for reading  <──────────  DiskChanged
//!   DiskChanged <──────────────
//! ```
//!
//! A change of the size is answered when the frontend has seen it (`HasSize`): the guest's next connection has the new size.
//!
//! The disk's own files stay locked for the whole change: the launcher has the descriptors whose locks keep writers out,
//! and gives them up when the overlay has locked the same files for reading.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use ringfence_block::storage::file::{
    FileKind, check_growth, enlarge, give_up_writing, grown, measure,
};
use ringfence_block::storage::qcow2::{BackingLocks, ChainFacts, MemberFormat};
use ringfence_driver::switchboard::{ToDriver, ToFrontend};
use ringfence_hostnet::text::printable;
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sys::descriptors::Descriptors;
use ringfence_uplink_process::egress::live::ClientId;

use super::guest_processes::GuestProcesses;
use super::served_file::{Change, PendingChange, ServedFile, Storage};
use crate::commands::{OverlayFacts, Reply, ServedFacts};

impl GuestProcesses<'_> {
    /// Answers a client that asks how a disk is served.
    pub(super) fn describe_disk(&mut self, id: ClientId, number: u16) {
        let reply = match self.served_file(number) {
            Ok(served) => Reply::Disk(Box::new(served.facts.clone())),
            Err(why) => failed(why),
        };
        self.reply(id, &reply);
    }

    /// Begins to replace a disk by an overlay whose files came with the request.
    pub(super) fn begin_snapshot(
        &mut self,
        id: ClientId,
        number: u16,
        overlay: OverlayFacts,
        fds: Descriptors,
    ) {
        if let Err(why) = self.try_snapshot(id, number, overlay, fds.into_vec()) {
            self.reply(id, &failed(why));
        }
    }

    fn try_snapshot(
        &mut self,
        id: ClientId,
        number: u16,
        overlay: OverlayFacts,
        files: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let served = self.served_file(number)?;
        let (facts, pending) =
            plan(served, id, overlay.path, overlay.any_folder, &overlay.chain, &files)?;
        let options = facts.options.clone();
        let order = ToDriver::Snapshot { handle: number, chain: overlay.chain, options };
        self.send_change(number, &order, &files, pending)
    }

    /// Begins to change the size of a disk: enlarges its file to `bytes`, or accepts the size that its storage has.
    pub(super) fn begin_resize(&mut self, id: ClientId, number: u16, bytes: Option<u64>) {
        if let Err(why) = self.try_resize(id, number, bytes) {
            self.reply(id, &failed(why));
        }
    }

    fn try_resize(&mut self, id: ClientId, number: u16, bytes: Option<u64>) -> Result<(), String> {
        let served = self.served_file(number)?;
        let bytes = new_size(served, bytes)?;
        let pending = PendingChange { client: id, what: Change::Resize { bytes } };
        self.send_change(number, &ToDriver::ResizeDisk { handle: number, bytes }, &[], pending)
    }

    /// Returns the file of a disk that no other change is about.
    fn served_file(&mut self, number: u16) -> Result<&mut ServedFile, String> {
        match self.disks.storage_mut(number) {
            Some(Storage::File(served)) if served.pending.is_none() => Ok(served),
            Some(Storage::File(_)) => {
                Err("another change of this disk has not ended yet: try again later".to_owned())
            }
            Some(Storage::Server(address)) => {
                Err(format!("the disk is on the server {address}, which alone can change it"))
            }
            None => Err(format!("the guest has no disk {number}")),
        }
    }

    fn send_change(
        &mut self,
        number: u16,
        order: &ToDriver,
        files: &[OwnedFd],
        pending: PendingChange,
    ) -> Result<(), String> {
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let driver = self.driver_channel().ok_or("there is no driver domain")?;
        driver.send_now(order, &fds).map_err(|error| format!("the driver domain: {error}"))?;
        self.served_file(number)?.pending = Some(pending);
        Ok(())
    }

    /// Ends a change that the driver domain has answered, and answers the client.
    pub(super) fn disk_is_changed(&mut self, number: u16, problem: Option<String>) {
        let Some(Storage::File(served)) = self.disks.storage_mut(number) else { return };
        let Some(PendingChange { client, what }) = served.pending.take() else { return };
        let mut remark = None;
        let reply = match (problem, what) {
            (Some(why), _) => failed(printable(&why)),
            (None, Change::Resize { bytes }) => {
                served.facts.bytes = bytes;
                let order = ToFrontend::AwaitSize { disk: number, bytes };
                let frontend = self.frontend.channel();
                if frontend.is_some_and(|frontend| frontend.send_now(&order, &[]).is_ok()) {
                    served.resizing.push((client, bytes));
                    return;
                }
                Reply::DiskChanged { bytes }
            }
            (None, Change::Snapshot { overlay, below, facts }) => {
                let bytes = facts.bytes;
                remark = exchange_locks(served, &below).err();
                served.text = facts.path.to_string_lossy().into_owned();
                (served.files, served.facts) = (vec![overlay], *facts);
                // An image is a file.
                served.kind = FileKind::Regular;
                Reply::DiskChanged { bytes }
            }
        };
        if let Some(why) = remark {
            self.reporter
                .problem(format_args!("disk {number}: its backing file is not locked: {why}"));
        }
        self.reply(client, &reply);
    }
}

impl GuestProcesses<'_> {
    /// Answers the clients that changed the size of a disk, once a new connection of the guest has that size.
    pub(super) fn disk_has_size(&mut self, number: u16) {
        let Some(Storage::File(served)) = self.disks.storage_mut(number) else { return };
        for (client, bytes) in std::mem::take(&mut served.resizing) {
            self.reply(client, &Reply::DiskChanged { bytes });
        }
    }
}

/// Checks the files of an overlay. Returns the facts of the disk above it, and the change.
fn plan(
    served: &ServedFile,
    client: ClientId,
    path: OsString,
    any_folder: bool,
    chain: &ChainFacts,
    files: &[OwnedFd],
) -> Result<(ServedFacts, PendingChange), String> {
    let text = |error: std::io::Error| error.to_string();
    if served.facts.options.read_only {
        return Err("the disk is read-only, so there is nothing to write to an overlay".to_owned());
    }
    let below = BackingLocks::of(chain, files, Path::new(&served.facts.path)).map_err(text)?;
    if !below.are_of(&served.files) {
        return Err("the overlay is above another file than the disk is in: another snapshot came first, or the file was \
                    moved"
            .to_owned());
    }
    let overlay = files.first().ok_or("the overlay is missing")?.try_clone().map_err(text)?;
    let (bytes, format) = (chain.bytes, MemberFormat::Qcow2);
    let facts = ServedFacts { path, format, any_folder, bytes, ..served.facts.clone() };
    let what = Change::Snapshot { overlay, below, facts: Box::new(facts.clone()) };
    Ok((facts, PendingChange { client, what }))
}

/// Locks the files below an overlay for reading, and gives up the disk's locks for writing.
fn exchange_locks(served: &ServedFile, below: &BackingLocks) -> Result<(), String> {
    served.files.iter().try_for_each(give_up_writing).map_err(|error| error.to_string())?;
    below.take().map_err(|error| error.to_string())
}

/// Returns the size that a disk gets, after its file was enlarged if a size is given.
pub(crate) fn new_size(served: &ServedFile, wanted: Option<u64>) -> Result<u64, String> {
    let text = |error: std::io::Error| error.to_string();
    let ServedFacts { format, bytes: before, sector_size, options, .. } = &served.facts;
    if *format == MemberFormat::Qcow2 {
        return Err("an image is enlarged while no guest uses it (qemu-img resize)".to_owned());
    }
    let file = served.files.first().ok_or("the file is missing")?;
    if let Some(wanted) = wanted {
        if options.read_only {
            return Err(
                "the disk is read-only: enlarge its file, and leave out the size".to_owned()
            );
        }
        check_growth(*before, wanted, *sector_size)?;
        enlarge(file, served.kind, wanted).map_err(text)?;
    }
    let found = measure(file, served.kind).map_err(text)?;
    grown(*before, found, *sector_size)
}

fn failed(why: String) -> Reply {
    Reply::Failed { status: STATUS_FAILED, why }
}

#[cfg(test)]
mod tests {
    use ringfence_block::storage::file::FileOptions;
    use ringfence_block::storage::qcow2::{ImageOptions, OpenChain, Overlay, OverlaySpec};

    use super::*;

    /// Returns the record of a disk in a file.
    fn served(path: &Path, read_only: bool) -> ServedFile {
        let options = FileOptions { read_only, ..FileOptions::default() };
        let facts = ServedFacts {
            path: path.as_os_str().to_owned(),
            format: MemberFormat::Raw,
            any_folder: false,
            bytes: 8192,
            sector_size: 512,
            options,
        };
        let files = vec![std::fs::File::open(path).unwrap().into()];
        let (text, kind, pending, resizing) = (String::new(), FileKind::Regular, None, Vec::new());
        ServedFile { text, files, facts, kind, pending, resizing }
    }

    #[test]
    fn overlay_above_another_file_than_the_disk_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let [own, other, new] = ["own", "other", "new"].map(|name| directory.path().join(name));
        [&own, &other].iter().for_each(|path| std::fs::write(path, [0; 8192]).unwrap());
        let (backing, format) = (own.clone(), MemberFormat::Raw);
        let spec = OverlaySpec { path: new.clone(), backing, format, bytes: 8192 };
        Overlay::create(&spec).unwrap().keep();
        let (chain, _) = OpenChain::open_above(&new, &ImageOptions::default(), None).unwrap();
        let facts = chain.facts();
        let plan = |served: &ServedFile, files: &[OwnedFd]| {
            plan(served, 1, new.clone().into(), false, &facts, files).map(|(facts, _)| facts.format)
        };
        assert_eq!(plan(&served(&own, false), &chain.files), Ok(MemberFormat::Qcow2));
        assert!(plan(&served(&other, false), &chain.files).unwrap_err().contains("another file"));
        assert!(plan(&served(&own, true), &chain.files).unwrap_err().contains("read-only"));
        assert!(plan(&served(&own, false), &chain.files[..1]).is_err(), "a file is missing");
        assert!(plan(&served(&own, false), &[]).is_err());
    }
}
