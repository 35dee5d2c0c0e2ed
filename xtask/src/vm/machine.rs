//! Emulated machines: QEMU without hardware virtualisation, so that they run anywhere, containers
//! and virtual machines included.
//!
//! A machine has no network card. It speaks over two serial ports: the console (Xen and Linux write
//! to it; kept in a file), and the results, which come out of QEMU's standard output. A folder of
//! the run is mounted inside by virtio-9p, for logs that should outlive a crash.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::images::Images;

/// What a machine is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Xen with a PV dom0. The kernel's own backends are not loaded.
    Xen,
    /// The same, for scenarios that load the kernel's own backends to compare with them.
    XenNetback,
    /// Xen on a processor that can run PVH guests.
    XenPvh,
    /// Linux alone.
    Linux,
    /// Linux with an IOMMU that faults, and a PCI device to put behind it.
    LinuxIommu,
    /// The same, with a kernel that has iommufd.
    LinuxIommufd,
    /// Linux with all that is installed on this computer, to be read.
    LinuxPrograms,
}

impl Kind {
    /// The machines that boot Xen.
    pub(super) const XEN: &[Kind] = &[Kind::Xen, Kind::XenNetback, Kind::XenPvh];
    /// The machines that boot Linux alone.
    pub(super) const LINUX: &[Kind] =
        &[Kind::Linux, Kind::LinuxIommu, Kind::LinuxIommufd, Kind::LinuxPrograms];

    /// As scenarios name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Xen => "xen",
            Kind::XenNetback => "xen-netback",
            Kind::XenPvh => "xen-pvh",
            Kind::Linux => "linux",
            Kind::LinuxIommu => "linux-iommu",
            Kind::LinuxIommufd => "linux-iommufd",
            Kind::LinuxPrograms => "linux-programs",
        }
    }

    /// The machine of that name.
    pub(super) fn from_name(name: &str) -> Option<Kind> {
        Kind::XEN.iter().chain(Kind::LINUX).copied().find(|kind| kind.name() == name)
    }

    /// True if it has an IOMMU.
    fn has_iommu(self) -> bool {
        matches!(self, Kind::LinuxIommu | Kind::LinuxIommufd)
    }

    /// True if it boots Xen.
    pub(super) fn is_xen(self) -> bool {
        Kind::XEN.contains(&self)
    }
}

/// A machine to be switched on.
pub(super) struct Machine<'a> {
    /// What it is like.
    pub(super) kind: Kind,
    /// What it boots.
    pub(super) images: &'a Images,
    /// Its first root file system, complete.
    pub(super) root: PathBuf,
    /// The hypervisor, if another than the images' own.
    pub(super) hypervisor: Option<PathBuf>,
    /// The kernel with iommufd, for the machine that has one.
    pub(super) iommufd: Option<&'a Path>,
    /// How many processors it has.
    pub(super) processors: u32,
    /// The folder that it shares with us.
    pub(super) share: PathBuf,
    /// Where the console goes; `None` for our own standard streams.
    pub(super) console: Option<PathBuf>,
    /// The PATH on which QEMU is.
    pub(super) path: std::ffi::OsString,
}

/// The processor. More capable models trip over SMAP here; without RDRAND guests wait for entropy.
const PROCESSOR: &str = "qemu64,+rdrand";
/// For every kernel: what costs time under emulation and shows nothing.
const LINUX_OPTIONS: &str =
    "rdinit=/init quiet loglevel=4 mitigations=off cryptomgr.notests panic=5";

impl Machine<'_> {
    /// Switches it on. On its console: our standard streams, or the file.
    pub(super) fn start(&self) -> anyhow::Result<Running> {
        // QEMU must not outlive us, not even if we are killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"]);
        command.args(self.hardware()).args(self.software()).env("PATH", &self.path);
        match &self.console {
            Some(_) => command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()),
            None => &mut command,
        };
        let mut child = command.spawn().context("setpriv and qemu-system-x86_64")?;
        let (lines, received) = channel();
        if let Some(out) = child.stdout.take() {
            let lines = lines.clone();
            std::thread::spawn(move || {
                let mut out = BufReader::new(out).split(b'\n');
                // A line that nobody reads any more is the end of the matter.
                while let Some(Ok(line)) = out.next() {
                    if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                        break;
                    }
                }
            });
        }
        if let Some(errors) = child.stderr.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(errors).lines().map_while(Result::ok) {
                    if lines.send(format!("qemu: {line}")).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Running { child, lines: received })
    }

    fn hardware(&self) -> Vec<String> {
        let svm = if self.kind == Kind::XenPvh { ",+svm,+npt" } else { "" };
        let memory = if self.kind.is_xen() { "2048" } else { "1024" };
        let q35 = if self.kind.has_iommu() { "q35,kernel-irqchip=split" } else { "q35" };
        let share = format!("local,id=share,path={},security_model=none", escaped(&self.share));
        let processors = self.processors.to_string();
        let mut words = vec!["-accel", "tcg,thread=multi", "-machine", q35, "-m", memory];
        words.extend(["-smp", &processors]);
        words.extend(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        words.extend(["-fsdev", &share, "-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);
        if self.kind.has_iommu() {
            words.extend(["-device", "intel-iommu,intremap=on,caching-mode=on"]);
            words.extend(["-device", "edu,dma_mask=0xffffffffffffffff"]);
        }
        if self.kind == Kind::LinuxPrograms {
            words.extend(["-fsdev", "local,id=computer,path=/,security_model=none,readonly=on"]);
            words.extend(["-device", "virtio-9p-pci,fsdev=computer,mount_tag=computer"]);
        }
        let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        words.extend(["-cpu".to_owned(), format!("{PROCESSOR}{svm}")]);
        let (console, results) = match &self.console {
            Some(file) => (format!("file:{}", file.display()), "stdio".to_owned()),
            None => {
                let results = self.share.join("results");
                ("mon:stdio".to_owned(), format!("file:{}", results.display()))
            }
        };
        words.extend(["-serial".to_owned(), console, "-serial".to_owned(), results]);
        words
    }

    fn software(&self) -> Vec<String> {
        let root = escaped(&self.root);
        if !self.kind.is_xen() {
            let debian = self.images.path("vmlinuz");
            let other = self.iommufd.filter(|_| self.kind == Kind::LinuxIommufd);
            let kernel = other.unwrap_or(&debian);
            let iommu = if self.kind.has_iommu() {
                " intel_iommu=on iommu.strict=1 no_timer_check"
            } else {
                ""
            };
            return vec![
                "-kernel".to_owned(),
                kernel.display().to_string(),
                "-initrd".to_owned(),
                self.root.display().to_string(),
                "-append".to_owned(),
                format!("console=ttyS0 {LINUX_OPTIONS}{iommu}"),
            ];
        }
        let built_in = self.images.path("xen.elf");
        let xen = self.hypervisor.as_ref().unwrap_or(&built_in);
        // A hypervisor built for debugging says what it thinks of guests; that is what it is for.
        let level = if self.hypervisor.is_some() { "all" } else { "error" };
        vec![
            "-kernel".to_owned(),
            xen.display().to_string(),
            "-append".to_owned(),
            format!(
                "com1=115200,8n1 console=com1 dom0_mem=900M,max:900M dom0_max_vcpus={} bootscrub=0 \
                 no-real-mode vga=none spec-ctrl=no xpti=no watchdog=0 loglvl=error guest_loglvl={level}",
                self.processors
            ),
            "-initrd".to_owned(),
            format!(
                "{} console=hvc0 {LINUX_OPTIONS},{root}",
                escaped(&self.images.path("vmlinux"))
            ),
        ]
    }
}

/// A path inside one of QEMU's options, in which a comma is doubled.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// A machine that is on. Dropping it switches it off.
pub(super) struct Running {
    child: Child,
    lines: Receiver<String>,
}

/// What came next.
pub(super) enum Heard {
    /// A line.
    Line(String),
    /// The machine has switched itself off, or crashed.
    Off,
    /// Nothing, until the deadline.
    Nothing,
}

impl Running {
    /// The next line of the results, waited for until `deadline`.
    pub(super) fn listen(&self, deadline: Instant) -> Heard {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Heard::Line(line),
            Err(RecvTimeoutError::Disconnected) => Heard::Off,
            Err(RecvTimeoutError::Timeout) => Heard::Nothing,
        }
    }

    /// Waits until it is off, for at most `time`; true if it did that by itself.
    pub(super) fn wait(mut self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            match self.child.try_wait() {
                Ok(Some(_)) => return true,
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                _ => return false,
            }
        }
    }

    /// Waits as long as it takes.
    pub(super) fn wait_for_ever(mut self) -> anyhow::Result<()> {
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already, which is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_is_found_by_its_name() {
        for kind in Kind::XEN.iter().chain(Kind::LINUX) {
            assert_eq!(Kind::from_name(kind.name()), Some(*kind));
        }
        assert_eq!(Kind::from_name("vax"), None);
    }
}
