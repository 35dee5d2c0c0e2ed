//! Disks of a guest on the command line: `--disk PATH[,ro][,mode=…][,cache=…]…`. The address of an NBD
//! server may stand in place of the path. A path has any bytes but commas.

use std::ffi::OsStr;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::anyhow;
use ringfence_access::Mode;
use ringfence_block::storage::file::{Engine, FileOptions, OpenFile};
use ringfence_block::storage::qcow2::{ImageOptions, OpenChain};
use ringfence_driver::switchboard::Medium;
use ringfence_nbd::client::{NbdAddress, NbdConnector, NbdOptions};
use ringfence_sandbox::channel::Channel;
use serde::Serialize;

/// Disk option as it was parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    pub source: Source,
    /// Access mode of the disk's pages.
    pub mode: Mode,
}

/// Location of a disk's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// File or block device.
    File {
        path: PathBuf,
        options: FileOptions,
    },
    /// qcow2 image with its backing files.
    Image {
        path: PathBuf,
        options: ImageOptions,
    },
    Nbd {
        address: NbdAddress,
        options: NbdOptions,
    },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::File { path, .. } | Source::Image { path, .. } => path.display().fmt(f),
            Source::Nbd { address, .. } => address.fmt(f),
        }
    }
}

const FILE_OPTIONS: &str = "ro, discard, mode=, cache=, bounce=, engine=, format=raw|qcow2, backing=any and sector=512|4096";
const SERVER_OPTIONS: &str = "ro, mode=, connect=, stall= and timeout=SECONDS";

/// Option of a disk as it was given: `NAME=VALUE`, or `NAME` with an empty value.
#[derive(Clone, Copy)]
struct DiskOption<'a> {
    name: &'a str,
    value: &'a str,
}

/// Applies an option that disks of all kinds have. Returns `false` for other options.
fn apply_common(
    mode: &mut Mode,
    read_only: &mut bool,
    DiskOption { name, value }: DiskOption<'_>,
) -> Result<bool, String> {
    match (name, value) {
        ("ro", "") => *read_only = true,
        ("mode", _) => *mode = Mode::for_disk(value).map_err(|error| format!("{error}"))?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Applies an option of files. Returns `false` for other options.
fn apply_to_file(
    options: &mut FileOptions,
    DiskOption { name, value }: DiskOption<'_>,
) -> Result<bool, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    match (name, value) {
        ("discard", "") => options.discard = true,
        ("format", "raw") => options.raw = true,
        ("cache", _) => options.cache = value.parse().map_err(|e| text(&e))?,
        ("bounce", _) => options.bounce = value.parse().map_err(|e| text(&e))?,
        ("engine", _) => options.engine = value.parse().map_err(|e| text(&e))?,
        ("sector", "512") => options.sector_size = Some(512),
        ("sector", "4096") => options.sector_size = Some(4096),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Applies an option of NBD servers. Returns `false` for other options.
fn apply_to_server(
    options: &mut NbdOptions,
    DiskOption { name, value }: DiskOption<'_>,
) -> Result<bool, String> {
    let limit = match name {
        "connect" => &mut options.connect,
        "stall" => &mut options.stall,
        "timeout" => &mut options.give_up,
        _ => return Ok(false),
    };
    *limit = match value.parse::<f64>().map(Duration::try_from_secs_f64) {
        Ok(Ok(time)) if (0.001..=86_400.0).contains(&time.as_secs_f64()) => time,
        _ => return Err(format!("`{name}={value}`: seconds are wanted, from 0.001 to 86400")),
    };
    Ok(true)
}

/// Options that make a file an image.
#[derive(Clone, Copy, Default)]
struct ImageWords {
    is_image: bool,
    any_folder: bool,
}

impl ImageWords {
    /// Applies an option of images. Returns `false` for other options.
    fn apply(&mut self, DiskOption { name, value }: DiskOption<'_>) -> bool {
        match (name, value) {
            ("format", "qcow2") => self.is_image = true,
            ("backing", "any") => self.any_folder = true,
            _ => return false,
        }
        true
    }

    /// Returns the source that a file with these options is.
    fn source(self, path: PathBuf, file: FileOptions) -> Result<Source, String> {
        match self {
            ImageWords { is_image: true, .. } if file.engine == Engine::IoUring => {
                Err("threads serve images: `engine=io_uring` is an option of raw files".to_owned())
            }
            ImageWords { is_image: true, .. } if file.raw => {
                Err("format=raw and format=qcow2 exclude each other".to_owned())
            }
            ImageWords { is_image: true, any_folder } => {
                Ok(Source::Image { path, options: ImageOptions { file, any_folder } })
            }
            ImageWords { any_folder: true, .. } => {
                Err("`backing=any` is an option of images: add format=qcow2".to_owned())
            }
            _ => Ok(Source::File { path, options: file }),
        }
    }
}

impl Source {
    /// Parses a path or the address of a server.
    fn parse(location: &OsStr) -> Result<Source, String> {
        let text = location.to_string_lossy();
        if NbdAddress::is_meant(&text) {
            let address = location.to_str().ok_or_else(|| {
                format!("{text}: bytes of an address that are no UTF-8 are written as %XX")
            })?;
            let address = address.parse().map_err(|error| format!("{error}"))?;
            return Ok(Source::Nbd { address, options: NbdOptions::default() });
        }
        let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
        if !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(format!(
                "{text}: a disk is a file, a block device or on an NBD server (nbd://HOST/NAME); a file of \
                 that name is ./{text}"
            ));
        }
        Ok(Source::File { path: location.into(), options: FileOptions::default() })
    }
}

/// Storage that was opened for another process.
pub(crate) struct OpenedSource {
    pub(crate) medium: Medium,
    /// Open file, files of an image in the order of its chain, or connection to the server unless it is made later.
    pub(crate) files: Vec<OwnedFd>,
    /// Connector to the server, for later connections.
    pub(crate) connector: Option<NbdConnector>,
}

impl Source {
    /// Opens and locks a file or the files of an image, or connects to a server. `report` receives remarks for the user.
    ///
    /// # Errors
    ///
    /// Returns an error that names the disk.
    pub(crate) fn open(&self, report: &dyn Fn(&str)) -> anyhow::Result<OpenedSource> {
        match self {
            Source::File { path, options } => {
                // The error's message has the reason already.
                let opened = OpenFile::open_reporting(path, options, report);
                let OpenFile { file, facts, mark } = opened.map_err(|error| anyhow!("{error}"))?;
                let medium = Medium::File { facts, options: options.clone() };
                Ok(OpenedSource {
                    medium,
                    files: [file].into_iter().chain(mark).collect(),
                    connector: None,
                })
            }
            Source::Image { path, options } => {
                let chain = OpenChain::open(path, options, report);
                let chain = chain.map_err(|error| anyhow!("{error}"))?;
                let (facts, options) = (chain.facts(), options.file.clone());
                let medium = Medium::Image { chain: facts, options };
                Ok(OpenedSource { medium, files: chain.files, connector: None })
            }
            Source::Nbd { address, options } => {
                let (connector, facts, stream) = NbdConnector::open(address, options)
                    .map_err(|error| anyhow!("--disk {address}: {error}"))?;
                let (medium, connector) = (Medium::Nbd(facts), Some(connector));
                Ok(OpenedSource { medium, files: stream.into_iter().collect(), connector })
            }
        }
    }
}

/// Connects to the server of a disk again, on another thread because that may take long. Sends the result to the process
/// that asked for it, in the message that `answer` makes of the problem.
pub(crate) fn dial<T: Serialize>(
    connector: &NbdConnector,
    channel: &Channel,
    answer: impl Fn(Option<String>) -> T + Clone + Send + 'static,
) {
    let (connector, on_thread) = (connector.clone(), answer.clone());
    let Ok(answers) = channel.try_clone() else { return };
    let connect = move || {
        let (stream, problem) = match connector.connect() {
            Ok(stream) => (Some(stream), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let fds: Vec<_> = stream.iter().map(AsFd::as_fd).collect();
        // Fails if the process is gone, which then needs no connection.
        let _ = answers.send(&on_thread(problem), &fds);
    };
    if let Err(error) = std::thread::Builder::new().name("dial".to_owned()).spawn(connect) {
        let _ = channel.send(&answer(Some(error.to_string())), &[]);
    }
}

impl DiskSpec {
    /// Parses an option of the command line. Only its path may have bytes that are no UTF-8.
    ///
    /// # Errors
    ///
    /// Returns a text for the user.
    pub(crate) fn parse(text: &OsStr) -> Result<DiskSpec, String> {
        let mut parts = text.as_bytes().split(|byte| *byte == b',');
        let location =
            parts.next().filter(|location| !location.is_empty()).ok_or("the path is missing")?;
        let mut source = Source::parse(OsStr::from_bytes(location))?;
        let mut mode = Mode::Persistent;
        let mut image = ImageWords::default();
        for part in parts {
            let part = std::str::from_utf8(part).map_err(|_| {
                let part = String::from_utf8_lossy(part);
                format!(
                    "`{part}` is no option: its bytes are no UTF-8 (a path cannot have a comma)"
                )
            })?;
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let option = DiskOption { name, value };
            let (known, all) = match &mut source {
                Source::File { options, .. } => (
                    apply_common(&mut mode, &mut options.read_only, option)?
                        || image.apply(option)
                        || apply_to_file(options, option)?,
                    FILE_OPTIONS,
                ),
                // Parsing makes an image of a file below.
                Source::Image { .. } => (false, FILE_OPTIONS),
                Source::Nbd { options, .. } => (
                    apply_common(&mut mode, &mut options.read_only, option)?
                        || apply_to_server(options, option)?,
                    SERVER_OPTIONS,
                ),
            };
            if !known {
                return Err(format!(
                    "`{part}` is no option of such a disk: there are {all} (a path cannot have a \
                     comma; in an address it is %2C)"
                ));
            }
        }
        if let Source::File { path, options } = source {
            source = image.source(path, options)?;
        }
        Ok(DiskSpec { source, mode })
    }
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskSpec, String> {
        DiskSpec::parse(OsStr::new(text))
    }
}

/// Returns the name of the variable that holds the socket's path of the command's disk `number`.
pub(crate) fn variable(number: usize) -> String {
    format!("RINGFENCE_DISK{number}")
}

/// Returns the name of the variable that holds the NBD address of the command's disk `number`.
pub(crate) fn uri_variable(number: usize) -> String {
    format!("RINGFENCE_DISK{number}_URI")
}

/// Returns the NBD address of the disk at the socket `path`, as NBD programs take it.
pub(crate) fn uri_of(path: &str) -> String {
    let mut uri = "nbd+unix:///?socket=".to_owned();
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                uri.push(byte.into());
            }
            _ => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    uri
}

/// Returns the name of the variable that holds the device's path of the command's disk `number`.
pub(crate) fn device_variable(number: usize) -> String {
    format!("RINGFENCE_DISK{number}_DEVICE")
}

#[cfg(test)]
mod tests {
    use ringfence_block::storage::file::{Bounce, CacheMode};

    use super::*;

    #[test]
    fn address_of_socket_has_every_special_byte_escaped() {
        assert_eq!(uri_of("/run/user/1000/d-0"), "nbd+unix:///?socket=/run/user/1000/d-0");
        assert_eq!(uri_of("/a b&c%é"), "nbd+unix:///?socket=/a%20b%26c%25%C3%A9");
    }

    #[test]
    fn path_with_options_is_parsed() {
        let file = |path: &str, options| Source::File { path: path.into(), options };
        let spec: DiskSpec = "/a=b.img".parse().unwrap();
        assert_eq!(spec.source, file("/a=b.img", FileOptions::default()));
        assert_eq!(spec.mode, Mode::Persistent);
        let text = "x,ro,mode=map,cache=writethrough,bounce=always,engine=threads,sector=4096,discard,\
                    format=raw";
        let spec: DiskSpec = text.parse().unwrap();
        assert_eq!(spec.mode, Mode::Map);
        let wanted = FileOptions {
            read_only: true,
            cache: CacheMode::WriteThrough,
            bounce: Bounce::Always,
            engine: Engine::Threads,
            sector_size: Some(4096),
            discard: true,
            raw: true,
            ..FileOptions::default()
        };
        assert_eq!(spec.source, file("x", wanted));
    }

    #[test]
    fn image_with_options_is_parsed() {
        let spec: DiskSpec = "x,format=qcow2,ro,backing=any".parse().unwrap();
        let file = FileOptions { read_only: true, ..FileOptions::default() };
        let options = ImageOptions { file, any_folder: true };
        assert_eq!(spec.source, Source::Image { path: "x".into(), options });
        assert!("x,format=qcow2,engine=io_uring".parse::<DiskSpec>().is_err(), "threads serve it");
    }

    #[test]
    fn path_of_any_bytes_is_kept_and_options_are_text() {
        for path in [&b"-dash"[..], b"--", b"\xff\xfe.img", b"./https://x", b"a:b", b"/x://y"] {
            let path = OsStr::from_bytes(path);
            let spec = DiskSpec::parse(path).unwrap();
            assert_eq!(
                spec.source,
                Source::File { path: path.into(), options: Default::default() }
            );
        }
        for text in [&b"x,ro\xff"[..], b"nbd://h/\xff"] {
            let error = DiskSpec::parse(OsStr::from_bytes(text)).unwrap_err();
            assert!(error.contains("no UTF-8"), "{error}");
        }
    }

    #[test]
    fn server_address_with_timeouts_is_parsed() {
        let text = "nbd+unix:///x?socket=/s,ro,mode=copy,timeout=0.5,stall=2,connect=3";
        let spec: DiskSpec = text.parse().unwrap();
        assert_eq!(spec.mode, Mode::Copy);
        let Source::Nbd { address, options } = spec.source else { panic!("{spec:?}") };
        assert_eq!(address.to_string(), "nbd+unix:///x?socket=/s");
        let wanted = NbdOptions {
            read_only: true,
            give_up: Duration::from_millis(500),
            stall: Duration::from_secs(2),
            connect: Duration::from_secs(3),
            ..NbdOptions::default()
        };
        assert_eq!(options, wanted);
    }

    #[test]
    fn invalid_disk_option_is_refused_with_reason() {
        for (text, why) in [
            ("", "path"),
            (",ro", "path"),
            ("x,rw", "`rw` is no option"),
            ("x,ro=1", "`ro=1` is no option"),
            ("x,sector=1024", "sector"),
            ("x,format=vmdk", "format=raw|qcow2"),
            ("x,format=raw,format=qcow2", "exclude each other"),
            ("x,backing=any", "add format=qcow2"),
            ("x,format=qcow2,backing=none", "`backing=none` is no option"),
            ("x,cache=direct", "writethrough"),
            ("x,mode=staging", "persistent and window"),
            ("x,timeout=3", "`timeout=3` is no option"),
            ("nbd://h,cache=none", "`cache=none` is no option"),
            ("nbd://h,timeout=0", "seconds are wanted"),
            ("nbd://h,timeout=nan", "seconds are wanted"),
            ("nbd://", "host is missing"),
            ("NBD://h", "small letters"),
            ("nbd:unix:/s", "nbd+unix:///?socket=/s"),
            ("nbd+vsock://2:1", "vsock"),
            ("nbd://h/x?socket=/s", "socket="),
            ("https://h/x", "./https://h/x"),
            ("ssh://h/x,ro", "NBD server"),
        ] {
            let error = text.parse::<DiskSpec>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
