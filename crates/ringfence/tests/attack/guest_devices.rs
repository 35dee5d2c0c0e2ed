//! Attacks of a guest's command on the host's devices, as root and as an ordinary user.

use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::require;
use crate::support::MOMENT;
use crate::support::needs::Need;
use crate::support::users::{Site, USER};

/// Prints the names of all device nodes below `/dev` and `/tmp`-like directories that can be opened.
const LIST: &str = "import os,stat,sys
for top in sys.argv[1:]:
    for directory, _, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)
            try:
                mode = os.lstat(path).st_mode
                if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    try:
                        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
                        print(path)
                    except OSError as error:
                        print(path, error.errno)
            except OSError:
                pass";

/// Nodes that every guest may have.
const COMMON: [&str; 11] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/net/tun",
    "/dev/fuse",
    "/dev/pts/ptmx",
    "/dev/pts/0",
    "/dev/console",
];

#[test]
fn host_devices_are_absent_where_files_are_limited_or_root_runs_the_command() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let is_root = site.ids().0 == 0;
        let always: &[&str] = if is_root { &["", "--as-root"] } else { &[] };
        for options in [always, &["--ro /", "--private dev", "--as-root --ro /"]].concat() {
            let said = site.run(options, &["python3", "-c", LIST, "/dev"]).succeed(MOMENT);
            let found: Vec<&str> = said.lines().filter_map(|line| line.split(' ').next()).collect();
            let strange: Vec<_> = found.iter().filter(|path| !COMMON.contains(path)).collect();
            assert!(strange.is_empty(), "{options}: {strange:?}");
            for needed in ["/dev/null", "/dev/urandom", "/dev/tty", "/dev/net/tun"] {
                assert!(found.contains(&needed), "{options}: {needed}: {said}");
            }
        }
    }
}

#[test]
fn terminals_of_the_guest_are_its_own_and_work() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    // A terminal of the host that belongs to the user.
    let script = "import os,sys
before = sorted(os.listdir('/dev/pts'))
master, slave = os.openpty()
os.write(master, b'typed\\n')
print(before, os.ttyname(slave), os.read(slave, 9), os.path.samefile('/dev/ptmx', '/dev/pts/ptmx'))
os.write(os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT), b'x')
print(os.listdir('/dev/shm'), os.listdir('/dev/mqueue'), os.readlink('/dev/fd'))
try:
    open('/dev/new', 'w')
except OSError as error:
    print(error.errno)";
    for site in Site::all() {
        let said = site.run("--ro /", &["python3", "-c", script]).succeed(MOMENT);
        let expected = "['ptmx'] /dev/pts/0 b'typed\\n' True\n['x'] [] /proc/self/fd\n30\n";
        assert_eq!(said, expected);
    }
}

#[test]
fn device_node_outside_of_dev_cannot_be_used() {
    require!(Need::Guests, Need::Root, Need::Program("python3", "python3"));
    for site in Site::all() {
        let node = site.lab.file("node");
        assert!(Command::new("mknod").arg(&node).args(["c", "1", "5"]).status().unwrap().success());
        std::fs::set_permissions(&node, PermissionsExt::from_mode(0o666)).unwrap();
        let directory = site.lab.file("").display().to_string();
        let list =
            |options: &str| site.run(options, &["python3", "-c", LIST, &directory]).succeed(MOMENT);
        let path = node.display();
        assert_eq!(list("--ro /"), format!("{path} 13\n"));
        assert_eq!(list(&format!("--ro / --dev {path}")), format!("{path}\n"));
    }
}

#[test]
fn devices_that_are_named_are_there() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let extra = ["/dev/loop-control", "/dev/kvm", "/dev/rtc0", "/dev/kmsg", "/dev/tty0"];
    let is_device = |path: &&str| {
        Path::new(path).metadata().is_ok_and(|metadata| metadata.file_type().is_char_device())
    };
    let Some(device) = extra.into_iter().find(is_device) else { return };
    for site in Site::all() {
        let list = |options: &str| {
            let said = site.run(options, &["python3", "-c", LIST, "/dev"]).succeed(MOMENT);
            let found = said.lines().filter_map(|line| line.split(' ').next());
            found.map(str::to_owned).collect::<Vec<_>>()
        };
        let options = format!("--ro / --dev {device} --dev /dev/net");
        let found = list(&options);
        assert!(found.iter().any(|path| path == device), "{found:?}");
        assert!(found.len() <= COMMON.len() + 1, "{found:?}");
        assert!(list("--ro / --dev /dev").len() > found.len(), "{found:?}");
        let missing = site.run("--ro / --dev /dev/absent", &["true"]).finish(MOMENT);
        assert_eq!(missing.status, Some(125));
        assert!(missing.stderr.contains("--dev /dev/absent: No such file"), "{}", missing.stderr);
    }
}

#[test]
fn symbolic_link_stands_for_its_target_in_options() {
    require!(Need::Guests);
    for site in Site::all() {
        let (tree, kept) = (site.lab.file("tree"), site.lab.file("tree/kept"));
        std::fs::create_dir_all(&kept).unwrap();
        for directory in [&tree, &kept] {
            std::fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).unwrap();
        }
        let (link, inner) = (site.lab.file("link"), site.lab.file("inner"));
        symlink("tree", &link).unwrap();
        symlink("tree/kept", &inner).unwrap();
        let options = format!("--ro {} --rw {}", link.display(), inner.display());
        let tree = tree.display();
        let script = format!(
            "(echo x > {tree}/new) 2>&- || echo refused; echo x > {tree}/kept/new && echo kept"
        );
        assert_eq!(site.script(&options, &script), "refused\nkept\n");
    }
}

#[test]
fn message_queues_and_shared_memory_are_the_guests_own() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let name = format!("ringfence-attack-{}", std::process::id());
        let outside = Path::new("/dev/shm").join(&name);
        std::fs::write(&outside, "secret").unwrap();
        std::fs::set_permissions(&outside, PermissionsExt::from_mode(0o666)).unwrap();
        let script = format!("ls /dev/shm /dev/mqueue | grep -c {name}");
        let said = |options: &str| {
            site.run(options, &["sh", "-c", &script]).finish(MOMENT).stdout.trim().to_owned()
        };
        for options in ["", "--as-root", "--ro /"] {
            assert_eq!(said(options), "0", "{options}");
        }
        assert_eq!(said("--share-runtime --dev /dev"), "1");
        std::fs::remove_file(&outside).unwrap();
    }
}

#[test]
fn configuration_of_ssh_that_root_owns_is_accepted() {
    require!(Need::Guests, Need::Root, Need::Program("ssh", "openssh-client"));
    for site in Site::all() {
        let etc = site.lab.file("etc");
        std::fs::create_dir_all(etc.join("ssh_config.d")).unwrap();
        let main = "Include /etc/ssh/ssh_config.d/*.conf\n";
        std::fs::write(etc.join("ssh_config"), main).unwrap();
        std::fs::write(etc.join("ssh_config.d/own.conf"), "Host x\n  Port 2222\n").unwrap();
        let passwd = etc.join("passwd");
        let users = std::fs::read_to_string("/etc/passwd").unwrap();
        std::fs::write(&passwd, format!("{users}rf-test:x:{USER}:{USER}::/:/bin/sh\n")).unwrap();
        let mount = format!(
            "mount --bind {} /etc/passwd && mount --bind {} /etc/ssh && exec \"$@\"",
            passwd.display(),
            etc.display()
        );
        let wrapper = ["unshare", "--mount", "sh", "-c", &mount, "sh"].into_iter();
        let wrapper: Vec<&str> = wrapper.chain(site.wrapper.iter().map(String::as_str)).collect();
        let script = "ssh -G x | grep '^port '; (echo x >> /etc/ssh/ssh_config.d/own.conf) 2>&- || echo refused";
        for options in ["--ro /", "--as-root --ro /"] {
            let guest = site.lab.start(options, &["sh", "-c", script], &wrapper).finish(MOMENT);
            assert_eq!(guest.stdout, "port 2222\nrefused\n", "{options}: {}", guest.stderr);
        }
    }
}
