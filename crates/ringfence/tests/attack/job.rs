//! Attacks of a guest's command on its caller's job: the terminal, the process group, the keys and the descriptors that
//! it was started with. As root and as an ordinary user.

use std::os::unix::fs::PermissionsExt;

use crate::require;
use crate::support::needs::Need;
use crate::support::screen::{SETSID, Screen};
use crate::support::users::Site;
use crate::support::{Lab, MOMENT, eventually};

const PYTHON: Need = Need::Program("python3", "python3");

/// Command that types a line into each terminal that it can name, in each way that the kernel has.
const TYPIST: &str = r#"
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
TIOCSTI, TIOCLINUX, TIOCSCTTY, TIOCCONS, TIOCNOTTY = 0x5412, 0x541c, 0x540e, 0x541d, 0x5422
line = b'touch typed\n'
def type_into(fd):
    for request in [TIOCSTI, TIOCSTI | 1 << 32, TIOCSTI | 0xffffffff << 32]:
        for byte in line:
            libc.ioctl(fd, ctypes.c_ulong(request), ctypes.byref(ctypes.c_char(byte)))
    libc.ioctl(fd, ctypes.c_ulong(TIOCLINUX), struct.pack('=bHHHHH', 2, 1, 1, 9, 1, 0))
    libc.ioctl(fd, ctypes.c_ulong(TIOCLINUX), b'\x03')
    libc.ioctl(fd, ctypes.c_ulong(TIOCCONS), None)
def terminals():
    found = list(range(0, 10))
    for path in ['/dev/tty', '/proc/self/fd/0', '/proc/self/fd/1', '/proc/self/fd/3']:
        try:
            found.append(os.open(path, os.O_RDWR | os.O_NOCTTY))
        except OSError:
            pass
    return [fd for fd in found if os.isatty(fd)]
for fd in terminals():
    type_into(fd)
# As the leader of a session that takes a terminal. Outside of a guest that takes root's terminal away from its shell.
if 'RINGFENCE_TEST_GUEST' in os.environ and os.fork() == 0:
    os.setsid()
    for fd in terminals():
        for argument in [0, 1]:
            libc.ioctl(fd, ctypes.c_ulong(TIOCSCTTY), argument)
        type_into(fd)
    os._exit(0)
if 'RINGFENCE_TEST_GUEST' in os.environ:
    os.wait()
print('tried', len(terminals()) > 0, flush=True)
"#;

/// Runs the typist on the terminal of a shell. Returns `true` if the shell has run the line.
fn shell_runs_typed_line(site: &Site, options: &str, redirections: &str) -> bool {
    let script = site.lab.file("typist.py");
    std::fs::write(&script, TYPIST).unwrap();
    let _ = std::fs::remove_file(site.lab.file("said"));
    let wrapper: Vec<&str> = site.wrapper.iter().map(String::as_str).collect();
    let mut shell = Screen::start(&site.lab, &[&wrapper[..], &["sh", "-im"]].concat());
    shell.expect("outer> ");
    let program = site.lab.program();
    let guest = format!(
        "{program} run -q --uplink none --switch none {options} -- env RINGFENCE_TEST_GUEST=1 python3 {} {redirections}\n",
        script.display()
    );
    shell.press(&guest);
    let said = || site.lab.file("said").exists().then(|| site.lab.read("said"));
    let tried =
        || shell.said.text().contains("tried") || said().is_some_and(|s| s.contains("tried"));
    assert!(eventually(MOMENT, tried), "{}", shell.said.text());
    // Keys typed before the end of the guest are the guest's. A line that was typed comes before the next one.
    shell.expect("outer> ");
    shell.press("echo after-$((40+2))\n");
    shell.expect("after-42");
    shell.press("exit\n");
    shell.finish();
    std::fs::remove_file(site.lab.file("typed")).is_ok()
}

#[test]
fn command_types_nothing_into_the_terminal_of_its_caller() {
    require!(Need::Guests, SETSID, PYTHON);
    for site in Site::all() {
        for options in ["", "--ro / --as-root", "--terminal shared"] {
            for redirections in ["", "3<>/dev/tty", "</dev/null >said 2>&1", "<&- | cat"] {
                let typed = shell_runs_typed_line(&site, options, redirections);
                assert!(!typed, "{options} {redirections}");
            }
        }
    }
}

/// The kernel types for whoever has the terminal, so the test above finds a shell that runs a line.
#[test]
fn program_outside_of_a_guest_types_into_the_terminal_of_its_caller() {
    let allowed = std::fs::read_to_string("/proc/sys/dev/tty/legacy_tiocsti");
    if allowed.is_ok_and(|text| text.trim() == "0") && !rustix::process::geteuid().is_root() {
        return;
    }
    require!(SETSID, PYTHON);
    let lab = Lab::new();
    std::fs::write(lab.file("typist.py"), TYPIST).unwrap();
    let mut shell = Screen::start(&lab, &["sh", "-im"]);
    shell.expect("outer> ");
    shell.press("python3 typist.py\n");
    shell.expect("tried True");
    shell.press("echo after-$((40+2))\n");
    shell.expect("after-42");
    assert!(eventually(MOMENT, || lab.file("typed").exists()));
}

#[test]
fn signal_to_the_commands_own_group_reaches_nobody_outside() {
    require!(Need::Guests, SETSID, PYTHON);
    // Every signal that ends a process, and a change of priority, for the group of the sender.
    let attack = "
import os, signal, sys
try:
    os.setpriority(os.PRIO_PGRP, 0, 19)
except OSError:
    pass
for number in [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGQUIT]:
    signal.signal(number, signal.SIG_IGN)
    os.kill(0, number)
print('sent', flush=True)
os.kill(0, signal.SIGKILL)";
    for site in Site::all() {
        std::fs::write(site.lab.file("attack.py"), attack).unwrap();
        let program = site.lab.program();
        let run = format!("{program} run -q --uplink none --switch none");
        // Shells without job control: all of this is one process group.
        let script = format!(
            "before=$(nice); {run} -- sh -c 'echo up; exec sleep 600' & other=$!; \
             for options in '' --as-root '--terminal shared'; do {run} $options -- python3 attack.py; echo status $?; done; \
             test $before = $(nice) && echo same; kill -0 $other && echo other runs; kill $other; wait $other; echo other $?; echo end"
        );
        let expected =
            "status 137\nsent\nstatus 137\nsent\nstatus 137\nsame\nother runs\nother 143\nend\n";
        let wrapper: Vec<&str> = site.wrapper.iter().map(String::as_str).collect();
        let words = [&wrapper[..], &["sh", "-c", &script]].concat();
        // A session of its own, so that the test does not end with the script.
        let alone = [&["setsid", "--wait"], &words[..]].concat();
        let finished = site.lab.spawn(&alone).finish(MOMENT);
        let said = finished.stdout.replace("up\n", "");
        assert_eq!(said, format!("sent\n{expected}"), "{}", finished.stderr);
        let mut screen = Screen::start(&site.lab, &words);
        screen.expect("other 143");
        screen.expect("end");
        assert_eq!(screen.said.text().matches("status 137").count(), 3);
        assert_eq!(screen.finish(), 0);
    }
}

#[test]
fn keys_of_the_callers_session_keyring_are_not_the_commands() {
    require!(Need::Guests, PYTHON);
    // Key types and numbers of linux/keyctl.h: the session keyring is -3.
    let outside = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
add_key, keyctl = 248, 250
if libc.syscall(keyctl, 1, None) < 0:
    sys.exit(42)
key = libc.syscall(add_key, b'user', b'ringfence-test', b'secret', 6, ctypes.c_int(-3))
assert key > 0, ctypes.get_errno()
buffer = ctypes.create_string_buffer(64)
assert libc.syscall(keyctl, 11, key, buffer, 64) == 6
os.environ['KEY'] = str(key)
os.execvp(sys.argv[1], sys.argv[1:])";
    let inside = "
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
keyctl, key = 250, int(os.environ['KEY'])
buffer = ctypes.create_string_buffer(64)
read = libc.syscall(keyctl, 11, key, buffer, 64)
found = libc.syscall(keyctl, 10, ctypes.c_int(-3), b'user', b'ringfence-test', 0)
print(read, found)";
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    for site in Site::all() {
        for options in ["", "--as-root"] {
            // The ordinary user may not enter root's own directories.
            let path = "PATH=/usr/bin:/bin:/usr/sbin:/sbin";
            let wrapper = ["env", path, "python3", "-c", outside];
            let guest = site.run_with(&wrapper, options, &["python3", "-c", inside]);
            let finished = guest.finish(MOMENT);
            if finished.status == Some(42) {
                // No keyrings in this container.
                continue;
            }
            assert_eq!(finished.stdout, "-1 -1\n", "{options} {}", finished.stderr);
        }
    }
}

#[test]
fn file_on_standard_input_stays_read_only_below_a_read_only_path() {
    require!(Need::Guests, PYTHON);
    let attack = "
import os
def attempt(path):
    try:
        os.write(os.open(path, os.O_WRONLY | os.O_APPEND), b'written')
    except OSError:
        pass
for fd in range(0, 10):
    attempt('/proc/self/fd/%d' % fd)
    attempt('/proc/self/fd/%d/file' % fd)
    attempt('/dev/fd/%d' % fd)
    try:
        os.utime('/proc/self/fd/%d' % fd, (0, 0))
        os.chmod('/proc/self/fd/%d' % fd, 0o777)
    except OSError:
        pass
print(os.read(0, 5).decode(), os.read(7, 5).decode())";
    for site in Site::all() {
        let (program, file) = (site.lab.program(), site.lab.file("file"));
        std::fs::write(&file, "first second").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
        std::fs::create_dir(site.lab.file("directory")).unwrap();
        let other = site.lab.file("directory").join("file");
        std::fs::write(&other, "other").unwrap();
        std::fs::set_permissions(&other, PermissionsExt::from_mode(0o666)).unwrap();
        std::fs::write(site.lab.file("attack.py"), attack).unwrap();
        let before = [&file, &other].map(|path| path.metadata().unwrap().modified().unwrap());
        let script = format!(
            "exec 7<file 8<directory; {{ {program} run -q --uplink none --switch none --ro / -- \
             python3 attack.py; cat; }} < file"
        );
        let wrapper: Vec<&str> = site.wrapper.iter().map(String::as_str).collect();
        let words = [&wrapper[..], &["sh", "-ec", &script]].concat();
        // The next program of the caller reads on where the command has stopped.
        let said = site.lab.spawn(&words).succeed(MOMENT);
        assert!(said.ends_with("first first\n second"), "{said}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "first second");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "other");
        let after = [&file, &other].map(|path| path.metadata().unwrap().modified().unwrap());
        assert_eq!(before, after);
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o666);
    }
}

#[test]
fn no_process_of_exec_is_a_handle_of_the_hosts_program() {
    require!(Need::Guests, PYTHON);
    // Looks at the program of each process until a file says that it is over.
    let attack = "
import os
reached = set()
while not os.path.exists('over'):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            path = '/proc/%s/exe' % pid
            if os.path.basename(os.readlink(path)) != 'ringfence':
                continue
            fd = os.open(path, os.O_RDONLY)
            reached.add('opened')
            os.fchmod(fd, 0o700)
            reached.add('changed')
        except OSError:
            pass
print('reached', *sorted(reached), flush=True)";
    for site in Site::all() {
        let attacker = site.run("-q --name held --ro / --switch none", &["python3", "-c", attack]);
        let wrapper: Vec<&str> = site.wrapper.iter().map(String::as_str).collect();
        let exec = [&wrapper[..], &[site.lab.program(), "exec", "held", "--", "true"]].concat();
        let runs = || site.lab.spawn(&exec).finish(MOMENT).status == Some(0);
        assert!(eventually(MOMENT, runs));
        for _ in 0..20 {
            site.lab.spawn(&exec).succeed(MOMENT);
        }
        std::fs::write(site.lab.file("over"), "").unwrap();
        assert_eq!(attacker.succeed(MOMENT), "reached\n");
    }
}
