//! Changes of the disk of a running guest: of `ringfence run` through its launcher, of `ringfence serve` through the daemon's
//! socket.
//!
//! This command creates the overlay of a snapshot. It removes the overlay again if the guest did not take it.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use ringfence_block::storage::file::FileOptions;
use ringfence_block::storage::qcow2::{
    ImageOptions, MemberFormat, OpenChain, Overlay, OverlaySpec,
};
use ringfence_driver::xen::config::{Config, PATH_DEFAULT};
use ringfence_driver::xen::status::{DiskChange, DiskOrder, VbdStatus, ask, change_disk};
use ringfence_hostnet::runtime_dir::RuntimeDirError;
use ringfence_hostnet::text::printable;
use ringfence_sandbox::channel::{Channel, ChannelError};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::super::find::{self, Found};
use super::super::{OverlayFacts, Reply, Request, ServedFacts};
use super::Target;

/// Time limit for a launcher's answer about a disk.
const ANSWER: Duration = Duration::from_secs(5);

/// Time limit for a change: the storage completes the requests in flight first.
const CHANGED: Duration = Duration::from_secs(60);

/// Guest whose disk is changed.
enum Guest {
    /// Guest of `ringfence run`, and the number of its disk.
    OfRun(Box<Found>, u16),
    /// Disk of a domain that the daemon at this socket serves.
    OfServe(PathBuf, Box<VbdStatus>),
}

/// Puts an overlay above a disk. Returns a text for the user.
pub(super) fn snapshot(
    target: &Target,
    device: Option<&str>,
    path: &Path,
) -> anyhow::Result<String> {
    match find_guest(target, device)? {
        Guest::OfRun(found, number) => {
            let served = served(&found.channel, &target.guest, number)?;
            let bytes = served.bytes;
            let overlay = create(path, Path::new(&served.path), served.format, bytes)?;
            let any_folder = overlay.needs_any_folder || served.any_folder;
            let ServedFacts { sector_size, options, .. } = served;
            let file = FileOptions { sector_size: Some(sector_size), ..options };
            let options = ImageOptions { file, any_folder };
            let (chain, _) = OpenChain::open_above(&overlay.path, &options, None)?;
            let facts = OverlayFacts {
                path: overlay.path.clone().into_os_string(),
                any_folder,
                chain: Box::new(chain.facts()),
            };
            let fds: Vec<_> = chain.files.iter().map(|file| file.as_fd()).collect();
            let request = Request::Snapshot { number, overlay: Box::new(facts) };
            found.channel.send(&request, &fds)?;
            let outcome =
                changed(&found.channel).map(|bytes| bytes.map_err(|why| anyhow!("{why}")));
            let below = printable(&Path::new(&served.path).display().to_string());
            let unmarked = remark(&overlay, &below);
            let created = finish(overlay, &target.guest, outcome)?;
            let option = if any_folder { ",backing=any" } else { "" };
            Ok(format!(
                "{}: disk {number} goes on in {created}, above {below}, which nothing may write any more\nnext start: --disk \
                 {created},format=qcow2{option}\n{unmarked}",
                target.guest,
            ))
        }
        Guest::OfServe(socket, disk) => {
            let (below, format) = storage_of(&disk)?;
            let bytes = disk.bytes.context("its storage is not open")?;
            let overlay = create(path, below, format, bytes)?;
            let any_folder = overlay.needs_any_folder;
            let change = DiskChange::Snapshot { path: overlay.path.clone(), any_folder };
            let VbdStatus { domain, handle, .. } = *disk;
            let outcome = change_disk(&socket, DiskOrder { domain, handle, change });
            let outcome = outcome.map(|outcome| outcome.map_err(|why| anyhow!("{why}")));
            let below = printable(&below.display().to_string());
            let unmarked = remark(&overlay, &below);
            let created = finish(overlay, &disk.name, outcome)?;
            let prefix = if any_folder { "qcow2,backing=any:" } else { "qcow2:" };
            Ok(format!(
                "{}: the disk goes on in {created}, above {below}, which nothing may write any more\nnext start, a reboot by `xl` \
                 included: target={prefix}{created} in the configuration of the domain\n{unmarked}",
                disk.name,
            ))
        }
    }
}

/// Changes the size of a disk. Returns a text for the user.
pub(super) fn resize(
    target: &Target,
    device: Option<&str>,
    bytes: Option<u64>,
) -> anyhow::Result<String> {
    if target.guest.contains('/') {
        return resize_of_machine(&target.guest, device, bytes);
    }
    let (name, outcome) = match find_guest(target, device)? {
        Guest::OfRun(found, number) => {
            found.channel.send(&Request::ResizeDisk { number, bytes }, &[])?;
            (format!("{}: disk {number}", target.guest), changed(&found.channel))
        }
        Guest::OfServe(socket, disk) => {
            let VbdStatus { domain, handle, .. } = *disk;
            let order = DiskOrder { domain, handle, change: DiskChange::Resize { bytes } };
            (disk.name, change_disk(&socket, order))
        }
    };
    match outcome.with_context(|| format!("{name}: the outcome is not known"))? {
        Ok(bytes) => Ok(format!("{name} has {bytes} bytes\n")),
        Err(why) => bail!("{name}: {}", printable(&why)),
    }
}

/// Changes the size of the disk of `vhost-user blk --control PATH`.
fn resize_of_machine(
    path: &str,
    device: Option<&str>,
    bytes: Option<u64>,
) -> anyhow::Result<String> {
    if let Some(device) = device {
        bail!("{path} leads to one disk: leave out `{device}`");
    }
    let connect = || -> std::io::Result<Channel> {
        let kind = SocketType::SEQPACKET;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Channel::from_fd(socket))
    };
    let channel = connect()
        .with_context(|| format!("{path}: `vhost-user blk --control {path}` does not answer"))?;
    channel.send(&Request::ResizeDisk { number: 0, bytes }, &[])?;
    match changed(&channel).with_context(|| format!("{path}: the outcome is not known"))? {
        Ok(bytes) => Ok(format!("{path}: the disk has {bytes} bytes\n")),
        Err(why) => bail!("{path}: {}", printable(&why)),
    }
}

/// Splits the words behind the guest: a single one with a unit is a size.
pub(super) fn device_and_size<'a>(
    device: Option<&'a str>,
    size: Option<&str>,
) -> anyhow::Result<(Option<&'a str>, Option<u64>)> {
    match (device, size) {
        (device, Some(size)) => {
            let bytes = parse_size(size);
            Ok((
                device,
                Some(bytes.with_context(|| {
                    format!("`{size}` is no size: a number with the unit K, M, G or T is wanted")
                })?),
            ))
        }
        (Some(word), None) => match parse_size(word) {
            Some(bytes) => Ok((None, Some(bytes))),
            None => Ok((Some(word), None)),
        },
        (None, None) => Ok((None, None)),
    }
}

/// Parses a number with a unit. Returns bytes.
fn parse_size(text: &str) -> Option<u64> {
    let (at, unit) = text.char_indices().next_back()?;
    let shift = match unit.to_ascii_uppercase() {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => return None,
    };
    let number = &text[..at];
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| is_number)?;
    number.checked_mul(1 << shift)
}

/// Finds the guest of `run`, or the domain of `serve`, and its disk.
fn find_guest(target: &Target, device: Option<&str>) -> anyhow::Result<Guest> {
    let Target { guest, socket } = target;
    let socket = match socket {
        Some(socket) => socket.clone(),
        None => match find::at_most_one(guest) {
            Ok(Some(found)) => {
                let number = number_of(device, found.guest.disks.len(), guest)?;
                return Ok(Guest::OfRun(Box::new(found), number));
            }
            // Without a runtime directory there are no guests of `run`, for example in dom0.
            Err(error) if !error.is::<RuntimeDirError>() => return Err(error),
            _ => Config::load(Path::new(PATH_DEFAULT), true)?.serve.status_socket,
        },
    };
    let snapshot = ask(&socket).map_err(|error| {
        anyhow!(
            "no guest of yours is called `{guest}` (`ringfence ps` lists all), and `ringfence serve` does not answer at {}: \
             {error}",
            socket.display()
        )
    })?;
    let is_guest = |disk: &VbdStatus| {
        disk.domain.to_string() == *guest || disk.domain_name.as_ref() == Some(guest)
    };
    let is_device = |disk: &VbdStatus| {
        device.is_none_or(|device| {
            disk.vdev.as_deref() == Some(device)
                || disk.name == device
                || disk.handle.to_string() == device
        })
    };
    let mut disks: Vec<_> = snapshot.disks.into_iter().filter(is_guest).collect();
    if disks.is_empty() {
        bail!("no guest of `run` and no domain with a disk is called `{guest}`");
    }
    let names: Vec<_> =
        disks.iter().map(|disk| disk.vdev.clone().unwrap_or(disk.name.clone())).collect();
    disks.retain(is_device);
    match (disks.pop(), disks.is_empty()) {
        (Some(disk), true) => Ok(Guest::OfServe(socket, Box::new(disk))),
        (Some(_), false) => bail!("name one of the disks of {guest}: {}", names.join(", ")),
        (None, _) => bail!("{guest} has no such disk: {}", names.join(", ")),
    }
}

/// Returns the number of a disk of `run`.
fn number_of(device: Option<&str>, disks: usize, guest: &str) -> anyhow::Result<u16> {
    let known = |number: &u16| usize::from(*number) < disks;
    match (device, disks) {
        (_, 0) => bail!("{guest} has no disk"),
        (None, 1) => Ok(0),
        (None, _) => bail!("{guest} has the disks 0 to {}: name one", disks - 1),
        (Some(word), _) => word
            .parse()
            .ok()
            .filter(known)
            .with_context(|| format!("{guest} has no disk `{word}`: they are numbered from 0")),
    }
}

/// Asks a launcher how a disk is served.
fn served(channel: &Channel, guest: &str, number: u16) -> anyhow::Result<ServedFacts> {
    channel.send(&Request::Disk(number), &[])?;
    match channel.receive_within(ANSWER)?.0 {
        Reply::Disk(served) => Ok(*served),
        Reply::Failed { why, .. } => bail!("{guest}: {}", printable(&why)),
        _ => bail!("{guest} is of another version of Ringfence"),
    }
}

/// Waits for the outcome of a change by a launcher.
fn changed(channel: &Channel) -> Result<Result<u64, String>, ChannelError> {
    match channel.receive_within(CHANGED)?.0 {
        Reply::DiskChanged { bytes } => Ok(Ok(bytes)),
        Reply::Failed { why, .. } => Ok(Err(printable(&why))),
        _ => Ok(Err("it is of another version of Ringfence".to_owned())),
    }
}

/// Returns the storage of a domain's disk and its format.
fn storage_of(disk: &VbdStatus) -> anyhow::Result<(&Path, MemberFormat)> {
    let format = match disk.format.as_deref() {
        Some("raw") => MemberFormat::Raw,
        Some("qcow2") => MemberFormat::Qcow2,
        _ => bail!("{}: its storage is a server's, which alone makes snapshots of it", disk.name),
    };
    let path = disk.storage.as_deref().with_context(|| format!("{} has no storage", disk.name))?;
    Ok((Path::new(path), format))
}

fn create(
    path: &Path,
    backing: &Path,
    format: MemberFormat,
    bytes: u64,
) -> anyhow::Result<Overlay> {
    let (path, backing) = (path.to_owned(), backing.to_owned());
    Ok(Overlay::create(&OverlaySpec { path, backing, format, bytes })?)
}

/// Returns a line about a file below an overlay that does not name it.
fn remark(overlay: &Overlay, below: &str) -> String {
    match &overlay.unmarked {
        Some(error) => format!(
            "{below} has no attribute that names the overlay ({error}): a start with the old disk would not be refused, and \
             damage the overlay\n"
        ),
        None => String::new(),
    }
}

/// Keeps the overlay if the guest took it, or may have taken it. Returns its path for people.
fn finish(
    overlay: Overlay,
    guest: &str,
    outcome: Result<anyhow::Result<u64>, ChannelError>,
) -> anyhow::Result<String> {
    let path = printable(&overlay.path.display().to_string());
    match outcome {
        Ok(Ok(_)) => {
            overlay.keep();
            Ok(path)
        }
        Ok(Err(error)) => Err(error.context(guest.to_owned())),
        Err(error) => {
            overlay.keep();
            let advice = format!(
                "{guest}: the outcome is not known, so {path} was kept; `ringfence ps --json` or `ringfence \
                                  status` show the disk"
            );
            Err(anyhow::Error::from(error).context(advice))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_word_with_a_unit_is_a_size_and_others_name_a_disk() {
        let of = |device, size| device_and_size(device, size).ok();
        assert_eq!(of(None, None), Some((None, None)));
        assert_eq!(of(Some("20G"), None), Some((None, Some(20 << 30))));
        assert_eq!(of(Some("1"), None), Some((Some("1"), None)));
        assert_eq!(of(Some("xvda"), Some("3t")), Some((Some("xvda"), Some(3 << 40))));
        for wrong in ["", "G", "-1G", "+1G", "1.5G", "20", "1GiB", "99999999999T"] {
            assert_eq!(of(Some("xvda"), Some(wrong)), None, "{wrong}");
            assert_eq!(of(Some(wrong), None), Some((Some(wrong), None)), "{wrong}");
        }
    }

    #[test]
    fn disk_is_named_unless_there_is_one() {
        assert_eq!(number_of(None, 1, "g").ok(), Some(0));
        assert_eq!(number_of(Some("1"), 2, "g").ok(), Some(1));
        for (word, disks) in [(None, 2), (None, 0), (Some("2"), 2), (Some("xvda"), 1)] {
            assert!(number_of(word, disks, "g").is_err(), "{word:?}, {disks}");
        }
    }
}
