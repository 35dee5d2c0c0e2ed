//! Emulated machines: QEMU without hardware virtualisation, so that they run anywhere, also in containers and
//! virtual machines.
//!
//! A machine has no network card and no disk, except the kinds with a host: processes of `ringfence` serve their devices, in
//! namespaces without a way out (`vm/linux/passt-host.sh`, `devices-host.sh`). A machine has two serial ports: the console
//! of Xen and Linux, which goes to a file, and the results, which are QEMU's standard output. A directory of the run is
//! mounted in the machine by virtio-9p, for logs that must survive a crash; a machine that migrates has none.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::images::Images;
use super::modes;
use super::program::Programs;

/// Kinds of machines that scenarios can request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Xen with a PV dom0, without the kernel's own backends.
    Xen,
    /// Xen for scenarios that load the kernel's own backends to compare with them.
    XenNetback,
    /// Xen on a processor that can run PVH guests.
    XenPvh,
    /// The same with an IOMMU, and a PCI device behind it.
    XenIommu,
    /// Linux without Xen.
    Linux,
    /// Linux with an IOMMU that reports faults, and a PCI device behind it.
    LinuxIommu,
    /// Linux with an IOMMU and a kernel that has iommufd.
    LinuxIommufd,
    /// Linux with read-only access to all programs of this computer.
    LinuxPrograms,
    /// Linux with a network card on `ringfence passt`.
    LinuxPasst,
    /// The same on the passt of this computer, to compare with it.
    LinuxPasstDebian,
    /// On `ringfence passt`, by vhost-user: QEMU shares the memory of the machine.
    LinuxVhostUser,
    /// On `ringfence passt`, by vhost-user: QEMU shares a pool, and the memory of the machine is private.
    LinuxLentPool,
    /// With network cards on `ringfence vhost-user net`: QEMU shares the memory of the machine.
    LinuxVhostUserNet,
    /// The same with a pool, and private memory.
    LinuxLentPoolNet,
    /// With these cards behind `ringfence shield`: QEMU shares the memory of the machine.
    LinuxShieldNet,
    /// With network cards of passt and testpmd, behind `ringfence shield` and without it: QEMU shares the memory of the machine.
    LinuxForeignNet,
    /// With cards of both behind `ringfence pool-proxy`: QEMU shares a pool, and the memory of the machine is private.
    LinuxLentPoolForeignNet,
    /// With disks behind `ringfence shield`: QEMU shares the memory of the machine. It can reboot.
    LinuxShield,
    /// With one such disk. It migrates to another QEMU while the disk is in use.
    LinuxShieldMigration,
}

impl Kind {
    /// Machines that boot Xen.
    pub(crate) const XEN: &[Kind] = &[Kind::Xen, Kind::XenNetback, Kind::XenPvh, Kind::XenIommu];
    /// Machines that boot Linux without Xen.
    pub(crate) const LINUX: &[Kind] = &[
        Kind::Linux,
        Kind::LinuxIommu,
        Kind::LinuxIommufd,
        Kind::LinuxPrograms,
        Kind::LinuxPasst,
        Kind::LinuxPasstDebian,
        Kind::LinuxVhostUser,
        Kind::LinuxLentPool,
        Kind::LinuxVhostUserNet,
        Kind::LinuxLentPoolNet,
        Kind::LinuxShieldNet,
        Kind::LinuxForeignNet,
        Kind::LinuxLentPoolForeignNet,
        Kind::LinuxShield,
        Kind::LinuxShieldMigration,
    ];

    /// Returns the name of the kind in scenarios.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Xen => "xen",
            Kind::XenNetback => "xen-netback",
            Kind::XenPvh => "xen-pvh",
            Kind::XenIommu => "xen-iommu",
            Kind::Linux => "linux",
            Kind::LinuxIommu => "linux-iommu",
            Kind::LinuxIommufd => "linux-iommufd",
            Kind::LinuxPrograms => "linux-programs",
            Kind::LinuxPasst => "linux-passt",
            Kind::LinuxPasstDebian => "linux-passt-debian",
            Kind::LinuxVhostUser => "linux-vhost-user",
            Kind::LinuxLentPool => "linux-lent-pool",
            Kind::LinuxVhostUserNet => "linux-vhost-user-net",
            Kind::LinuxLentPoolNet => "linux-lent-pool-net",
            Kind::LinuxShieldNet => "linux-shield-net",
            Kind::LinuxForeignNet => "linux-foreign-net",
            Kind::LinuxLentPoolForeignNet => "linux-lent-pool-foreign-net",
            Kind::LinuxShield => "linux-shield",
            Kind::LinuxShieldMigration => "linux-shield-migration",
        }
    }

    /// Returns the kind with that name.
    pub(crate) fn from_name(name: &str) -> Option<Kind> {
        Kind::XEN.iter().chain(Kind::LINUX).copied().find(|kind| kind.name() == name)
    }

    /// Returns `true` for machines with an IOMMU.
    fn has_iommu(self) -> bool {
        matches!(self, Kind::XenIommu | Kind::LinuxIommu | Kind::LinuxIommufd)
    }

    /// Returns the script of the machine's host in `vm/linux`, and its argument.
    fn host(self) -> Option<(&'static str, &'static str)> {
        match self {
            Kind::LinuxPasst => Some(("passt-host.sh", "stream")),
            Kind::LinuxPasstDebian => Some(("passt-host.sh", "debian")),
            Kind::LinuxVhostUser => Some(("passt-host.sh", "vhost-user")),
            Kind::LinuxLentPool => Some(("passt-host.sh", "lent-pool")),
            Kind::LinuxVhostUserNet => Some(("devices-host.sh", "net")),
            Kind::LinuxLentPoolNet => Some(("devices-host.sh", "net-pool")),
            Kind::LinuxShieldNet => Some(("devices-host.sh", "net-shield")),
            Kind::LinuxForeignNet => Some(("devices-host.sh", "foreign-net")),
            Kind::LinuxLentPoolForeignNet => Some(("devices-host.sh", "foreign-pool")),
            Kind::LinuxShield => Some(("devices-host.sh", "shield")),
            Kind::LinuxShieldMigration => Some(("devices-host.sh", "migration")),
            _ => None,
        }
    }

    /// Returns `true` for machines whose memory QEMU shares with backends.
    fn shares_memory(self) -> bool {
        let plain = [Kind::LinuxVhostUser, Kind::LinuxVhostUserNet, Kind::LinuxForeignNet];
        let shields = [Kind::LinuxShieldNet, Kind::LinuxShield, Kind::LinuxShieldMigration];
        plain.contains(&self) || shields.contains(&self)
    }

    /// Returns `true` for machines with the directory of the run. QEMU migrates none that has mounted it.
    fn has_share(self) -> bool {
        self != Kind::LinuxShieldMigration
    }

    /// Returns `true` for machines with a pool.
    pub(crate) fn has_pool(self) -> bool {
        let pools = [Kind::LinuxLentPool, Kind::LinuxLentPoolNet, Kind::LinuxLentPoolForeignNet];
        pools.contains(&self)
    }

    /// Returns `true` for machines that boot Xen.
    pub(crate) fn is_xen(self) -> bool {
        Kind::XEN.contains(&self)
    }
}

/// Settings of a machine.
pub(crate) struct Machine<'a> {
    pub(crate) kind: Kind,
    pub(crate) images: &'a Images,
    /// Root of the repository.
    pub(crate) repository: &'a Path,
    pub(crate) programs: &'a Programs,
    /// Complete first root file system.
    pub(crate) root: PathBuf,
    /// Hypervisor that replaces the one in the images.
    pub(crate) hypervisor: Option<PathBuf>,
    /// More words for the hypervisor's command line.
    pub(crate) options: &'a str,
    /// Kernel with iommufd, for the kind that needs it.
    pub(crate) iommufd: Option<&'a Path>,
    /// Set if a thread samples the modes of the processors whenever a scenario wants it.
    pub(crate) sampled: bool,
    /// Set if each instruction takes a nanosecond of the machine's time.
    pub(crate) counts_instructions: bool,
    pub(crate) processors: u32,
    /// Directory that is mounted in the machine.
    pub(crate) share: PathBuf,
    /// File for the console; `None` for this process's standard streams.
    pub(crate) console: Option<PathBuf>,
    /// PATH that contains QEMU.
    pub(crate) path: std::ffi::OsString,
}

/// Processor model. More capable models fail with SMAP here; without RDRAND guests wait for entropy.
const PROCESSOR: &str = "qemu64,+rdrand";
/// Options of every kernel: no mitigations and self-tests, which cost time under emulation, and few messages.
const LINUX_OPTIONS: &str =
    "rdinit=/init quiet loglevel=4 mitigations=off cryptomgr.notests panic=5";

/// Option of dom0's kernel: a root file system without a limit. That of a tmpfs is half of the memory that the first
/// root file system leaves free, and parts of guests do not fit in what remains.
const UNLIMITED_ROOT: &str = "rootfstype=ramfs";

/// Options for a pool, which is all that QEMU shares.
const LENT_POOL: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=pool,size=64M,share=on",
    "-device",
    "ivshmem-plain,memdev=pool,addr=0x10",
];

impl Machine<'_> {
    /// Starts the machine, with its console on this process's standard streams or in the file.
    pub(crate) fn start(&self) -> anyhow::Result<Running> {
        // QEMU must exit with this process, even if this process is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]);
        if let Some((script, devices)) = self.kind.host() {
            command.args(["unshare", "--user", "--map-root-user", "--net", "--mount"]);
            // A new user namespace clears the death signal.
            command.args(["setpriv", "--pdeathsig", "KILL", "--", "sh"]);
            command.arg(self.repository.join("vm/linux").join(script));
            command.arg(devices);
            command.args([&self.programs.ringfence, &self.programs.traffic, &self.share]);
        }
        command
            .arg("qemu-system-x86_64")
            .args(self.hardware())
            .args(self.software())
            .env("PATH", &self.path);
        let monitor = self.sampled.then(|| modes::socket(&self.share));
        if let Some(socket) = &monitor {
            let server = format!("unix:{},server=on,wait=off", escaped(socket));
            command.args(["-qmp", &server]);
        }
        match &self.console {
            Some(_) => command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()),
            None => &mut command,
        };
        let mut child = command.spawn().context("setpriv and qemu-system-x86_64")?;
        if let Some(socket) = monitor {
            modes::watch(socket, self.share.clone());
        }
        let (lines, received) = channel();
        if let Some(out) = child.stdout.take() {
            let lines = lines.clone();
            std::thread::spawn(move || {
                let mut out = BufReader::new(out).split(b'\n');
                // The receiver is dropped when nothing reads the results any more.
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
        let svm =
            if matches!(self.kind, Kind::XenPvh | Kind::XenIommu) { ",+svm,+npt" } else { "" };
        let memory = if self.kind.is_xen() { "2048" } else { "1024" };
        let q35 = if self.kind.has_iommu() { "q35,kernel-irqchip=split" } else { "q35" };
        let share = format!("local,id=share,path={},security_model=none", escaped(&self.share));
        let processors = self.processors.to_string();
        let mut words = match self.counts_instructions {
            // Time passes by instructions alone, and a machine that waits for time is moved to its end.
            true => vec!["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"],
            false => vec!["-accel", "tcg,thread=multi"],
        };
        words.extend(["-machine", q35, "-m", memory]);
        words.extend(["-smp", &processors]);
        words.extend(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        if self.kind.has_share() {
            let device = "virtio-9p-pci,fsdev=share,mount_tag=share";
            words.extend(["-fsdev", &share, "-device", device]);
        }
        if self.kind.has_iommu() {
            words.extend(["-device", "intel-iommu,intremap=on,caching-mode=on"]);
            words.extend(["-device", "edu,dma_mask=0xffffffffffffffff"]);
        }
        if self.kind == Kind::XenIommu {
            // A card that sends to itself needs no network.
            words.extend(["-netdev", "hubport,id=card,hubid=0"]);
            words.extend(["-device", "e1000e,netdev=card,romfile="]);
        }
        if self.kind == Kind::LinuxPrograms {
            let all = "local,id=computer,path=/,security_model=none,readonly=on,multidevs=remap";
            words.extend(["-fsdev", all]);
            words.extend(["-device", "virtio-9p-pci,fsdev=computer,mount_tag=computer"]);
        }
        let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        if self.kind.shares_memory() {
            let file = format!("memory-backend-memfd,id=memory,size={memory}M,share=on");
            words.extend(["-object".to_owned(), file]);
            words.extend(["-machine", "memory-backend=memory"].map(str::to_owned));
        }
        if self.kind.has_pool() {
            words.extend(LENT_POOL.map(str::to_owned));
        }
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
        // A debug build of the hypervisor must log its complaints about guests.
        let level = if self.hypervisor.is_some() { "all" } else { "error" };
        vec![
            "-kernel".to_owned(),
            xen.display().to_string(),
            "-append".to_owned(),
            format!(
                "com1=115200,8n1 console=com1 dom0_mem=900M,max:900M dom0_max_vcpus={} bootscrub=0 \
                 no-real-mode vga=none spec-ctrl=no xpti=no watchdog=0 loglvl=error guest_loglvl={level} {}",
                self.processors, self.options
            ),
            "-initrd".to_owned(),
            format!(
                "{} console=hvc0 {UNLIMITED_ROOT} {LINUX_OPTIONS},{root}",
                escaped(&self.images.path("vmlinux"))
            ),
        ]
    }
}

/// Escapes a path for QEMU's options, in which a comma is doubled.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Running machine. Dropped, it is switched off.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
}

/// Results of waiting for a line.
pub(crate) enum Heard {
    Line(String),
    /// The machine was switched off, or crashed.
    Off,
    /// The deadline passed without a line.
    Nothing,
}

impl Running {
    /// Waits for the next line of the results until `deadline`.
    pub(crate) fn listen(&self, deadline: Instant) -> Heard {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Heard::Line(line),
            Err(RecvTimeoutError::Disconnected) => Heard::Off,
            Err(RecvTimeoutError::Timeout) => Heard::Nothing,
        }
    }

    /// Waits until the machine is off, for at most `time`. Returns `true` if it powered off by itself.
    pub(crate) fn wait(mut self, time: Duration) -> bool {
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

    /// Waits until the machine is off, without a time limit.
    pub(crate) fn wait_for_ever(mut self) -> anyhow::Result<()> {
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if the machine has ended already, which is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name() {
        for kind in Kind::XEN.iter().chain(Kind::LINUX) {
            assert_eq!(Kind::from_name(kind.name()), Some(*kind));
        }
        assert_eq!(Kind::from_name("vax"), None);
    }
}
