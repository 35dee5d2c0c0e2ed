//! `ringfence disk`: `info` says how a file would be served as a disk, with the chain of an image, and why not. `snapshot` and
//! `resize` change the disk of a running guest (`changes`).
//!
//! `info` reads the headers of the files and takes no lock, so a disk that is in use can be described.

mod changes;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::builder::{OsStringValueParser, TypedValueParser};
use ringfence_block::storage::file::{Engine, FileDescription, FileOptions, check_uring};
use ringfence_block::storage::qcow2::{ImageOptions, Member, MemberFormat, OpenChain};
use serde::Serialize;

use crate::disk::{DiskSpec, Source};

/// Exit status for a disk that would not be served.
const STATUS_REFUSED: u8 = 1;

/// Actions of `ringfence disk`.
#[derive(Debug, clap::Subcommand)]
pub enum DiskCommand {
    /// Say how a file would be served as a disk, with its backing files, and why not
    ///
    /// The options behind the path are those of `run --disk`. A file that begins like a qcow2 image is described as one, and
    /// the line `option` has what `--disk` must be to serve it so. The file is read and not locked. The exit status is
    /// 1 if it would not be served.
    #[command(
        after_help = "Example:\n  ringfence disk info vm.qcow2\n  ringfence disk info vm.qcow2,format=qcow2,backing=any --json"
    )]
    Info {
        /// The file, with options of `run --disk`
        #[arg(value_name = "IMG[,format=qcow2][,backing=any]", allow_hyphen_values = true,
              value_parser = OsStringValueParser::new().try_map(|text| DiskSpec::parse(&text)))]
        disk: DiskSpec,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Put an overlay above the disk of a running guest, which goes on
    ///
    /// The overlay is a new qcow2 image. It takes all writes from now on, and the file of the disk is its backing file, with the
    /// content of one moment: every write that the guest knows of, flushed. Nothing may write to that file any more. At its
    /// next start the guest must be given the overlay; the command says how.
    #[command(allow_missing_positional = true, after_help = SNAPSHOT_EXAMPLES)]
    Snapshot {
        #[command(flatten)]
        target: Target,
        /// The disk: its number, or its name in the domain's configuration [default: the only one]
        #[arg(value_name = "DEV", index = 2)]
        device: Option<String>,
        /// Path of the overlay. It does not exist yet
        #[arg(value_name = "NEW.qcow2", index = 3)]
        overlay: PathBuf,
    },
    /// Let a running guest have all of a disk that was enlarged
    ///
    /// Linux takes the new size at once. Programs at the NBD socket of `ringfence run` have it when they connect anew. Disks only
    /// grow. Images are enlarged while no guest uses them (`qemu-img resize`).
    #[command(after_help = RESIZE_EXAMPLES)]
    Resize {
        #[command(flatten)]
        target: Target,
        /// The disk: its number, or its name in the domain's configuration [default: the only one]
        #[arg(value_name = "DEV", index = 2)]
        device: Option<String>,
        /// Size that the file gets first, with the unit K, M, G or T [default: the size that it has]
        #[arg(value_name = "SIZE", index = 3)]
        size: Option<String>,
    },
}

const SNAPSHOT_EXAMPLES: &str = "\
Examples:
  ringfence disk snapshot web after-setup.qcow2
  ringfence disk snapshot vm1 xvda /srv/vm1-tuesday.qcow2";

const RESIZE_EXAMPLES: &str = "\
Examples:
  ringfence disk resize web 20G
  lvextend -L +10G /dev/vg/vm1 && ringfence disk resize vm1 xvda
  ringfence disk resize /run/vm.control 40G";

/// Guest whose disk is changed.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// Name of a guest of `ringfence run` or PID of its launcher; or name or number of a domain of `ringfence serve`; or,
    /// with a `/`, the path of --control of `ringfence vhost-user blk`, whose disk can be resized
    #[arg(index = 1)]
    pub guest: String,
    /// Socket of the daemon; GUEST is a domain then [default: as the daemon's configuration says]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Description of a disk. The field names are those of `--json`.
#[derive(Debug, Serialize)]
struct Description {
    image: String,
    format: MemberFormat,
    /// Value of `--disk` that serves it so.
    option: String,
    served: bool,
    /// Reason for which the disk is not served.
    why_not: Option<String>,
    /// Engine that would execute the I/O here: `io_uring` or `threads`.
    engine: String,
    /// Reason for which threads serve a raw file.
    no_io_uring: Option<String>,
    /// Size of the disk in bytes.
    size: Option<u64>,
    /// Members from the image down.
    chain: Vec<MemberDescription>,
}

/// Description of a file of a chain.
#[derive(Debug, Serialize)]
struct MemberDescription {
    path: String,
    format: MemberFormat,
    /// Size in bytes of the disk that the file holds.
    size: u64,
    version: Option<u32>,
    cluster_size: Option<u64>,
    lazy_refcounts: Option<bool>,
    data_file: Option<String>,
}

impl MemberDescription {
    fn of(member: &Member) -> MemberDescription {
        let header = member.header.as_ref();
        MemberDescription {
            path: member.path.display().to_string(),
            format: member.facts.format,
            size: header.map_or(member.facts.file.bytes, |header| header.bytes),
            version: header.map(|header| header.version),
            cluster_size: header.map(|header| header.cluster()),
            lazy_refcounts: header.map(|header| header.lazy_refcounts),
            data_file: member.data_file.as_ref().map(|path| path.display().to_string()),
        }
    }

    /// Returns a line for people.
    fn line(&self) -> String {
        let mut line = match self.format {
            MemberFormat::Raw => format!("{}: raw, {} bytes", self.path, self.size),
            MemberFormat::Qcow2 => format!(
                "{}: qcow2 version {}, {} bytes, clusters of {} bytes",
                self.path,
                self.version.unwrap_or(0),
                self.size,
                self.cluster_size.unwrap_or(0)
            ),
        };
        if let Some(data_file) = &self.data_file {
            let _ = write!(line, ", data in {data_file}");
        }
        line
    }
}

/// Runs an action. Returns the output and the exit status.
///
/// # Errors
///
/// Returns an error for a disk that is no file, and for a change that was not made.
pub fn run(command: &DiskCommand) -> anyhow::Result<(String, u8)> {
    match command {
        DiskCommand::Info { disk, json } => describe(disk, *json),
        DiskCommand::Snapshot { target, device, overlay } => {
            Ok((changes::snapshot(target, device.as_deref(), overlay)?, 0))
        }
        DiskCommand::Resize { target, device, size } => {
            let (device, bytes) = changes::device_and_size(device.as_deref(), size.as_deref())?;
            Ok((changes::resize(target, device, bytes)?, 0))
        }
    }
}

/// Describes a disk. Returns the text and the exit status.
fn describe(disk: &DiskSpec, json: bool) -> anyhow::Result<(String, u8)> {
    let description = match &disk.source {
        Source::File { path, options } => describe_file(path, options),
        Source::Image { path, options } => describe_image(path, options),
        Source::Nbd { address, .. } => {
            bail!("{address}: only files and block devices are described")
        }
    };
    let status = if description.served { 0 } else { STATUS_REFUSED };
    let text = match json {
        true => serde_json::to_string_pretty(&description)? + "\n",
        false => description.text(),
    };
    Ok((text, status))
}

/// Describes a file that is served as raw bytes, or as an image if it begins like one.
fn describe_file(path: &Path, options: &FileOptions) -> Description {
    let described = FileDescription::of(path, options);
    if described.as_ref().is_ok_and(|file| file.is_qcow) && !options.raw {
        let options = ImageOptions { file: options.clone(), any_folder: false };
        return describe_image(path, &options);
    }
    let (size, why_not) = match described {
        Ok(FileDescription { bytes, refusal, .. }) => (Some(bytes), refusal),
        Err(error) => (None, Some(error)),
    };
    let (engine, no_io_uring) = engine_of(options);
    let refusal = no_io_uring.as_ref().filter(|_| options.engine == Engine::IoUring);
    let why_not = why_not.map(|error| error.to_string()).or_else(|| refusal.cloned());
    Description {
        image: path.display().to_string(),
        format: MemberFormat::Raw,
        option: option_of(path, options.raw.then_some("format=raw"), false),
        served: why_not.is_none(),
        why_not,
        engine: engine.to_string(),
        no_io_uring,
        size,
        chain: vec![],
    }
}

/// Returns the engine of a raw file, and the reason for threads that were not asked for.
fn engine_of(options: &FileOptions) -> (Engine, Option<String>) {
    if options.engine == Engine::Threads {
        return (Engine::Threads, None);
    }
    match check_uring() {
        Ok(()) => (Engine::IoUring, None),
        Err(error) => (Engine::Threads, Some(format!("io_uring is refused here: {error}"))),
    }
}

fn describe_image(path: &Path, options: &ImageOptions) -> Description {
    let (members, why_not) = match OpenChain::describe(path, options) {
        Ok(members) => (members, None),
        Err((members, error)) => (members, Some(error.to_string())),
    };
    let chain: Vec<MemberDescription> = members.iter().map(MemberDescription::of).collect();
    Description {
        image: path.display().to_string(),
        format: MemberFormat::Qcow2,
        option: option_of(path, Some("format=qcow2"), options.any_folder),
        served: why_not.is_none(),
        why_not,
        engine: Engine::Threads.to_string(),
        no_io_uring: None,
        size: chain.first().map(|image| image.size),
        chain,
    }
}

/// Returns the value of `--disk` for a file.
fn option_of(path: &Path, format: Option<&str>, any_folder: bool) -> String {
    let looks_like_option = path.display().to_string().contains("://");
    let path = if looks_like_option { PathBuf::from("./").join(path) } else { path.to_owned() };
    let parts = [format, any_folder.then_some("backing=any")];
    parts.into_iter().flatten().fold(path.display().to_string(), |option, part| option + "," + part)
}

impl Description {
    /// Returns the description for people.
    fn text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "option: --disk {}", self.option);
        if let Some(size) = self.size {
            let _ = writeln!(text, "size: {size} bytes");
        }
        let reason = self.no_io_uring.as_deref().map_or(String::new(), |why| format!(" ({why})"));
        let _ = writeln!(text, "engine: {}{reason}", self.engine);
        for (level, member) in self.chain.iter().enumerate() {
            let name = if level == 0 { "image" } else { "backing file" };
            let _ = writeln!(text, "{name}: {}", member.line());
        }
        let _ = match &self.why_not {
            None => writeln!(text, "served: yes"),
            Some(why_not) => writeln!(text, "served: no: {why_not}"),
        };
        text
    }
}
