//! Orchestration of the random attack: two correct guests and three attackers on one switch, hostile processes at its
//! control socket, a hostile NBD server, and checks of all of them.
//!
//! ```text
//!  honest-a ──┐                      ┌── attacker 0   command: frames, NBD, control, files, uplink
//!             ├── switch (driver) ───┼── attacker 1   frontend: hub, store, event channels, arenas
//!  honest-b ──┘        ▲             └── attacker 2   (each life draws its families anew)
//!      │ verify        │ Stats, garbage
//!   TICK/FINDING    control socket
//! ```
//!
//! The attack proceeds in rounds. In a round each attacker starts and ends several times, which are its lives. After
//! the round, with no attacker left, the program samples descriptors and memory of all other processes.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ringfence_driver::switchboard::{FromDriver, ToDriver, VERSION};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::Channel;

use crate::support::world::{Families, World};
use crate::support::{Noise, Running, eventually};
use crate::watchdog::{STUCK, Series, Watchdog};

/// Attack families: of commands, of frontends, and of other processes of the host.
const ALL: [&str; 8] =
    ["frames", "spoof", "nbd", "control", "files", "uplink", "frontend", "server"];
const ROUND: Duration = Duration::from_secs(20);
const ATTACKERS: usize = 3;
/// Maximum number of findings that are kept.
const FINDINGS_MAX: usize = 1000;
/// Time limit for the start and for the end of a guest.
const WITHIN: Duration = Duration::from_secs(60);

/// Plan for one life of a frontend, in the name of its program's file. A frontend's environment is empty, and with a
/// user of its own it can read no file of its launcher.
pub(crate) struct Plan {
    /// Seed of everything random.
    pub(crate) seed: u64,
    /// Attack families of this life.
    pub(crate) families: Vec<String>,
}

impl Plan {
    /// Links `program` under a name that contains the plan. Returns the new path.
    fn name_program(&self, program: &Path) -> PathBuf {
        let mut name = program.as_os_str().to_owned();
        name.push(format!(".{}.{}", self.seed, self.families.join("+")));
        let name = PathBuf::from(name);
        std::fs::hard_link(program, &name).unwrap();
        name
    }

    /// Parses the plan in the name of the running program. Returns an empty plan if there is none.
    pub(crate) fn of_this_program() -> Plan {
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut words = name.split('.').skip(1);
        let seed = words.next().and_then(|seed| seed.parse().ok()).unwrap_or(1);
        let families = words.next().unwrap_or_default();
        Plan { seed, families: families.split('+').map(str::to_owned).collect() }
    }
}

/// Settings from the environment.
pub(crate) struct Settings {
    seed: u64,
    rounds: u64,
    families: Vec<String>,
    program: PathBuf,
}

impl Settings {
    /// Reads `RINGFENCE_ATTACK_MINUTES`, `_SEED`, `_FAMILIES` and `_PROGRAM`.
    pub(crate) fn from_environment() -> Settings {
        let get = |name: &str| std::env::var(format!("RINGFENCE_ATTACK_{name}")).ok();
        let minutes: f64 = get("MINUTES").map_or(0.0, |text| text.parse().unwrap());
        let asked = Duration::try_from_secs_f64(minutes * 60.0).unwrap();
        let rounds = u64::try_from(asked.as_nanos().div_ceil(ROUND.as_nanos())).unwrap().max(1);
        let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
        Settings {
            seed: get("SEED").map_or(u64::from(clock), |text| text.parse().unwrap()),
            rounds,
            families: get("FAMILIES")
                .map_or_else(|| ALL.map(str::to_owned).to_vec(), |text| words(&text)),
            program: get("PROGRAM")
                .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_ringfence")), PathBuf::from),
        }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

/// Findings and sums of the whole attack.
#[derive(Default)]
struct Record {
    findings: Mutex<Vec<String>>,
    lives: Mutex<[u64; 2]>,
    worst_control: Mutex<Duration>,
}

impl Record {
    fn find(&self, finding: String) {
        let mut findings = self.findings.lock().unwrap();
        // Repeated findings are dropped, because those of two hours would fill a disk.
        if !findings.contains(&finding) && findings.len() < FINDINGS_MAX {
            println!("  FINDING {finding}");
            findings.push(finding);
        }
    }
}

/// Runs the attack. Returns the findings.
pub(crate) fn run(settings: &Settings) -> Option<Vec<String>> {
    let world = World::of(Families::V4, &settings.program)?;
    println!(
        "attack random: {} rounds of {ROUND:?}, seed {}, families {}, {}",
        settings.rounds,
        settings.seed,
        settings.families.join(","),
        settings.program.display()
    );
    let attackers: Vec<PathBuf> = (0..ATTACKERS).map(|number| copy(&world, number)).collect();
    std::fs::write(world.file("attacker.py"), include_str!("attacker.py")).unwrap();
    let mut honest = [
        honest_guest(&world, "honest-a", "honest-b", settings.seed),
        honest_guest(&world, "honest-b", "honest-a", settings.seed + 1),
    ];
    for guest in &honest {
        guest.wait_for_output("TICK 2 ");
    }
    let watched: Vec<_> = honest.iter().zip(["a", "b"]).flat_map(|(g, n)| roles(g, n)).collect();
    let mut series: Vec<Series> =
        watched.iter().map(|(name, process)| Series::new(name.clone(), process.clone())).collect();
    let (record, end) = (Record::default(), AtomicBool::new(false));
    let hostile = world.file("hostile.sock");
    let mut noise = Noise::from_seed(settings.seed.wrapping_mul(0x9e37_79b9));
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| hostile_server(&hostile, settings.seed, &end));
        for round in 1..=settings.rounds {
            let watchdog = Watchdog::start(watched.clone());
            let until = Instant::now() + ROUND;
            std::thread::scope(|scope| {
                for program in &attackers {
                    let (seed, world, record, hostile) = (noise.next(), &world, &record, &hostile);
                    scope.spawn(move || {
                        lives(world, program, settings, seed, until, record, hostile)
                    });
                }
                let wants_stranger = settings.families.iter().any(|family| family == "control");
                let stranger = wants_stranger.then(|| stranger(&world, noise.next()));
                control_latency(&world, &watchdog, until, &record);
                stranger.map(Running::end);
            });
            let quiet = eventually(WITHIN, || guests_on(&world) == Some(2));
            if !quiet {
                record.find(format!("{:?} guests are on the switch", guests_on(&world)));
            }
            std::thread::sleep(Duration::from_secs(1));
            watchdog.stop().into_iter().for_each(|finding| record.find(finding));
            for (series, (name, _)) in series.iter_mut().zip(&watched) {
                if !series.sample() {
                    record.find(format!("the {name} is gone"));
                }
            }
            let left = honest.iter_mut().any(|guest| !guest.is_running());
            print_round(round, &honest, &record, start);
            if left {
                record.find("an honest guest ended".to_owned());
                break;
            }
        }
        end.store(true, Relaxed);
    });
    let mut findings = record.findings.into_inner().unwrap();
    for series in &series {
        findings.extend(series.judge());
    }
    // A guest that ends after the other one reports that end, which is no finding.
    let reports = honest.each_ref().map(|guest| guest.stdout.text());
    findings.extend(reports.iter().flat_map(|said| report(said)));
    for guest in honest {
        guest.end();
    }
    Some(findings)
}

/// Copies this program, so that attackers' names can be links to the copy.
fn copy(world: &World, number: usize) -> PathBuf {
    let to = world.file(&format!("attacker{number}"));
    std::fs::copy(std::env::current_exe().unwrap(), &to).unwrap();
    to
}

/// Starts the process that attacks the control socket from outside of guests.
fn stranger(world: &World, seed: u64) -> Running {
    let (this, directory) = (std::env::current_exe().unwrap(), world.lab.runtime_dir());
    let (this, directory) = (this.display().to_string(), directory.display().to_string());
    world.host(&[&this, "stranger", &directory, &seed.to_string()])
}

fn honest_guest(world: &World, name: &str, peer: &str, seed: u64) -> Running {
    let image = world.file(&format!("{name}.img"));
    std::fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let this = std::env::current_exe().unwrap();
    let options = format!("--switch s --name {name} --disk {}", image.display());
    let guest =
        world.plain_guest(&options, &format!("exec {} honest {peer} {seed}", this.display()));
    guest.wait_up();
    guest
}

/// Returns the processes of a guest that serve others: launcher, supervisors, frontend and uplink, and for the first
/// guest the driver domain.
fn roles(guest: &Running, name: &str) -> Vec<(String, crate::support::processes::Process)> {
    let role = |arguments: &[String]| {
        let at = arguments.iter().position(|word| word == "internal")?;
        let words: Vec<&str> = arguments[at + 1..].iter().map(String::as_str).take(2).collect();
        let words = words.into_iter().filter(|word| !word.starts_with('-') && !word.is_empty());
        Some(words.collect::<Vec<_>>().join(" of "))
    };
    let all = guest.processes().into_iter();
    all.filter_map(|p| Some((format!("{} of honest-{name}", role(&p.arguments)?), p))).collect()
}

/// Runs the lives of one attacker until the round ends.
fn lives(
    world: &World,
    program: &Path,
    settings: &Settings,
    seed: u64,
    until: Instant,
    record: &Record,
    hostile: &Path,
) {
    let mut noise = Noise::from_seed(seed);
    let image = program.with_extension("img");
    std::fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    while Instant::now() < until {
        let families: Vec<String> =
            settings.families.iter().filter(|_| noise.below(2) == 0).cloned().collect();
        let wants = |family: &str| families.iter().any(|other| other == family);
        let plan = Plan { seed: noise.next(), families: families.clone() };
        let named = plan.name_program(program);
        let left = until.saturating_duration_since(Instant::now()).as_millis();
        let life = noise.below(u64::try_from(left).unwrap_or(0).max(500)) + 500;
        let disk = if wants("server") {
            format!("nbd+unix:///?socket={}", hostile.display())
        } else {
            image.display().to_string()
        };
        let mode = ["copy", "map", "staging", "window"][usize::try_from(noise.below(4)).unwrap()];
        let script = format!(
            "exec {} run -q --as-root --switch s --mode {mode} --disk {disk} -- python3 attacker.py {} {} {}",
            named.display(),
            noise.next() >> 1,
            life as f64 / 1000.0,
            families.join(","),
        );
        let guest = world.host(&["sh", "-ec", &script]);
        let pid = guest.pid();
        let mut guest = Some(guest);
        let deadline = Duration::from_millis(life) + Duration::from_secs(2);
        let ended = eventually(deadline, || !guest.as_mut().unwrap().is_running());
        if !ended {
            // The first signal makes the launcher end its guest. The launcher may have ended meanwhile.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let gone = eventually(WITHIN, || !guest.as_mut().unwrap().is_running());
        let _ = std::fs::remove_file(&named);
        if gone {
            let finished = guest.take().unwrap().finish(WITHIN);
            let mut lives = record.lives.lock().unwrap();
            lives[0] += 1;
            lives[1] += u64::from(finished.stdout.contains("DEEDS"));
        } else {
            record.find(format!("a launcher did not end within {WITHIN:?}: {script}"));
        }
    }
}

/// Returns the number of guests on the switch, if the driver domain answers.
fn guests_on(world: &World) -> Option<usize> {
    stats(world).ok().map(|stats| stats.ports.keys().filter(|name| *name != "gone").count())
}

fn stats(world: &World) -> Result<ringfence_driver::switchboard::DriverStats, String> {
    let directory = RuntimeDir::open_at(world.lab.runtime_dir()).map_err(|e| e.to_string())?;
    let socket = directory.connect("s").map_err(|e| e.to_string())?.ok_or("no switch")?;
    let channel = Channel::from_fd(socket);
    // A launcher of the host sends the host's user namespace, which is not always this process's.
    let namespace = std::fs::File::open(world.user_namespace()).map_err(|e| e.to_string())?;
    let hello = ToDriver::Hello { version: VERSION.to_owned() };
    channel.send(&hello, &[namespace.as_fd()]).map_err(|e| e.to_string())?;
    channel.send(&ToDriver::Stats, &[]).map_err(|e| e.to_string())?;
    match channel.receive_within(WITHIN).map_err(|e| e.to_string())?.0 {
        FromDriver::Stats(stats) => Ok(*stats),
        other => Err(format!("{other:?}")),
    }
}

/// Requests the counters until the round ends. An answer that takes more than a second, apart from the delay of the
/// machine itself, is a finding.
fn control_latency(world: &World, watchdog: &Watchdog, until: Instant, record: &Record) {
    while Instant::now() < until {
        watchdog.lateness();
        let start = Instant::now();
        let answer = stats(world);
        let took = start.elapsed();
        if let Err(why) = answer {
            record.find(format!("the control socket does not answer: {why}"));
        }
        if took > STUCK + watchdog.lateness() {
            record.find(format!("an answer of the control socket took {took:?}"));
        }
        let mut worst = record.worst_control.lock().unwrap();
        *worst = took.max(*worst);
        drop(worst);
        std::thread::sleep(Duration::from_millis(250));
    }
}

/// Runs an NBD server that stalls, sends garbage, or closes the connection.
fn hostile_server(path: &Path, seed: u64, end: &AtomicBool) {
    let listener = UnixListener::bind(path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut noise = Noise::from_seed(seed ^ 0x5e4e);
    let mut held = Vec::new();
    while !end.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        for client in &mut held {
            let stream: &mut &std::os::unix::net::UnixStream = client;
            let _ = stream.read(&mut [0; 4096]);
            if noise.below(4) == 0 {
                let garbage: Vec<u8> =
                    (0..noise.below(40)).map(|_| noise.next().to_le_bytes()[0]).collect();
                let _ = stream.write(&garbage);
            }
        }
        let Ok((client, _)) = listener.accept() else { continue };
        client.set_nonblocking(true).unwrap();
        let _ = greet(&client, &mut noise);
        held.push(&*Box::leak(Box::new(client)));
        if held.len() > 20 {
            let client = held.remove(usize::try_from(noise.below(20)).unwrap());
            let _ = client.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Sends the start of a correct greeting, so that some clients continue.
fn greet(mut client: &std::os::unix::net::UnixStream, noise: &mut Noise) -> std::io::Result<()> {
    if noise.below(3) > 0 {
        client.write_all(b"NBDMAGICIHAVEOPT")?;
        client.write_all(&[0, 3])?;
    }
    Ok(())
}

fn last_tick(guest: &Running) -> Vec<u64> {
    let text = guest.stdout.text();
    let last = text.lines().rev().find_map(|line| line.strip_prefix("TICK "));
    last.unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect()
}

fn print_round(round: u64, honest: &[Running; 2], record: &Record, start: Instant) {
    let ticks: Vec<String> = honest.iter().map(|guest| format!("{:?}", last_tick(guest))).collect();
    let lives = *record.lives.lock().unwrap();
    println!(
        "round {round}, {:.0?}: {} attackers lived, {} to their own end; honest guests \
         [seconds, bytes, pings, disk requests, worst ping µs, worst disk µs] {}; worst control \
         answer {:.0?}; {} findings",
        start.elapsed(),
        lives[0],
        lives[1],
        ticks.join(" "),
        record.worst_control.lock().unwrap(),
        record.findings.lock().unwrap().len(),
    );
}

/// Returns the findings in a correct guest's report, and gaps without progress.
fn report(said: &str) -> Vec<String> {
    let mut findings: Vec<String> = Vec::new();
    let lines = said.lines();
    findings.extend(lines.clone().filter(|l| l.starts_with("FINDING")).map(str::to_owned));
    let ticks: Vec<Vec<u64>> = lines
        .filter_map(|line| line.strip_prefix("TICK "))
        .map(|line| line.split(' ').filter_map(|word| word.parse().ok()).collect())
        .collect();
    let worst = |column: usize| ticks.iter().filter_map(|t| t.get(column)).max().copied();
    let last = |column: usize| ticks.last().and_then(|tick| tick.get(column)).copied();
    println!(
        "  honest guest: {:?} bytes verified, {:?} pings (worst {:?} µs), {:?} disk requests (worst {:?} µs)",
        last(1),
        last(2),
        worst(4),
        last(3),
        worst(5),
    );
    for (column, name) in [(1, "stream"), (2, "ping"), (3, "disk")] {
        if last(column).unwrap_or(0) == 0 {
            findings.push(format!("an honest guest's {name} did nothing"));
        }
        // Ten seconds without progress are far more than a busy machine causes.
        let stalled = ticks.windows(11).find(|w| w[0].get(column) == w[10].get(column));
        if let Some(window) = stalled {
            findings
                .push(format!("an honest guest's {name} stood still from second {}", window[0][0]));
        }
    }
    findings
}
