//! The link over a real socket, with this process as both ends.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use super::*;
use crate::fleet::{PoolUpdate, ReplicaUpdate};

const DEADLINE: Duration = Duration::from_secs(10);

struct Bench {
    path: PathBuf,
    updates: watch::Receiver<FleetUpdate>,
    states: watch::Sender<Bytes>,
    reloads: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
    _directory: tempfile::TempDir,
}

fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let (sender, updates) = watch::channel(FleetUpdate::default());
    let answerer: Arc<Answerer> = Arc::new(|question| {
        Box::pin(async move { (200, Bytes::from(format!("{} at {}", question.question, question.path))) })
    });
    let control = Control::bind(path.to_str().unwrap(), "127.0.0.1:8080", sender, answerer).unwrap();
    let reloads = Arc::<Notify>::default();
    let (states, receiver) = watch::channel(Bytes::from(rmp_serde::to_vec_named(&json!({"version": 1})).unwrap()));
    let task = tokio::spawn(control.run(receiver, Arc::clone(&reloads)));
    Bench { path, updates, states, reloads, task, _directory: directory }
}

/// A frame as the control process reads it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct Frame {
    r#type: String,
    state: Value,
    id: u64,
    status: u16,
    body: frames::Blob,
}

async fn receive(stream: &mut UnixStream) -> Frame {
    let frame = tokio::time::timeout(DEADLINE, read_frame(stream)).await.expect("a frame in time").unwrap();
    rmp_serde::from_slice(&frame).unwrap()
}

async fn send(stream: &mut UnixStream, message: &impl serde::Serialize) {
    let bytes = rmp_serde::to_vec_named(message).unwrap();
    stream.write_all(&(bytes.len() as u32).to_be_bytes()).await.unwrap();
    stream.write_all(&bytes).await.unwrap();
}

#[derive(serde::Serialize)]
struct FleetMessage {
    r#type: &'static str,
    update: FleetUpdate,
}

async fn greeted(bench: &Bench) -> UnixStream {
    let mut stream = UnixStream::connect(&bench.path).await.unwrap();
    assert_eq!(receive(&mut stream).await.r#type, "hello");
    assert_eq!(receive(&mut stream).await.state, json!({"version": 1}));
    stream
}

#[tokio::test]
async fn a_fleet_arrives_and_states_go_back() {
    let mut bench = bench();
    let mut stream = greeted(&bench).await;
    let replica = ReplicaUpdate { id: "http://a".into(), ready: true, ..ReplicaUpdate::default() };
    let pool = PoolUpdate { name: "m".into(), replicas: vec![replica], ..PoolUpdate::default() };
    let update = FleetUpdate { version: 7, pools: vec![pool], ..FleetUpdate::default() };
    send(&mut stream, &FleetMessage { r#type: "fleet", update: update.clone() }).await;
    tokio::time::timeout(DEADLINE, bench.updates.changed()).await.unwrap().unwrap();
    assert_eq!(*bench.updates.borrow(), update);
    bench.states.send_replace(Bytes::from(rmp_serde::to_vec_named(&json!({"version": 7})).unwrap()));
    assert_eq!(receive(&mut stream).await.state, json!({"version": 7}));
}

#[tokio::test]
async fn questions_are_answered_by_number() {
    let bench = bench();
    let mut stream = greeted(&bench).await;
    for id in [3, 4] {
        send(&mut stream, &json!({"type": "ask", "id": id, "question": "explain", "path": "/v1/chat/completions"}))
            .await;
    }
    let (one, two) = (receive(&mut stream).await, receive(&mut stream).await);
    assert_eq!((one.status, one.id + two.id), (200, 7));
    assert_eq!(one.body.0, b"explain at /v1/chat/completions");
}

#[tokio::test]
async fn unknown_messages_are_passed_over_and_bad_frames_end_the_connection() {
    let bench = bench();
    let mut stream = greeted(&bench).await;
    send(&mut stream, &json!({"type": "from the future", "id": 1})).await;
    send(&mut stream, &json!({"type": "ask", "id": 1, "question": "fleet"})).await;
    assert_eq!(receive(&mut stream).await.r#type, "answer");
    for bad in [&b"\0\0\0\x02\xc1\xc1"[..], b"\xff\xff\xff\xff"] {
        let mut stream = greeted(&bench).await;
        stream.write_all(bad).await.unwrap();
        let end = tokio::time::timeout(DEADLINE, stream.read_u8()).await.unwrap();
        assert!(end.is_err(), "closed");
    }
    greeted(&bench).await;
}

#[tokio::test]
async fn a_new_control_process_replaces_the_old_one() {
    let bench = bench();
    let mut old = greeted(&bench).await;
    let mut new = greeted(&bench).await;
    assert!(tokio::time::timeout(DEADLINE, old.read_u8()).await.unwrap().is_err(), "closed");
    send(&mut new, &json!({"type": "ask", "id": 1, "question": "fleet"})).await;
    assert_eq!(receive(&mut new).await.r#type, "answer");
}

#[tokio::test]
async fn the_socket_file_of_a_dead_process_is_replaced_and_ours_is_removed_at_the_end() {
    let bench = bench();
    bench.task.abort();
    let _aborted = bench.task.await;
    assert!(!bench.path.exists());
    std::fs::write(&bench.path, b"left over").unwrap();
    let (sender, _updates) = watch::channel(FleetUpdate::default());
    let answerer: Arc<Answerer> = Arc::new(|_| Box::pin(async { (200, Bytes::new()) }));
    assert!(Control::bind(bench.path.to_str().unwrap(), "x", sender, answerer).is_ok());
}

#[tokio::test]
async fn a_reload_asked_for_while_nobody_is_connected_reaches_the_next_control_process_once() {
    let bench = bench();
    bench.reloads.notify_one();
    let mut stream = UnixStream::connect(&bench.path).await.unwrap();
    let mut kinds = vec![];
    for _ in 0..3 {
        kinds.push(receive(&mut stream).await.r#type);
    }
    kinds.sort();
    assert_eq!(kinds, ["hello", "reload", "state"]);
    greeted(&bench).await;
}
