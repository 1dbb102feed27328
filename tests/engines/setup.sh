#!/usr/bin/env bash
# Installs other people's runners below .venv/engines: setup.sh prism | boot | flink ...
# Does nothing where they are installed already.
#
#   prism, boot  Beam's portable runner, and what starts a worker: built by Go.
#   flink        a distribution (from PyPI: bin, conf, lib), and Beam's job server for it (from
#                Maven; Java 17). Flink 2.2 where Beam's jar for it can be had, else 1.19.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
engines=$PWD/.venv/engines
beam=2.77.0
mkdir -p "$engines/bin"

go_program() {  # name, its package in Beam's module
  [[ -x "$engines/bin/$1" ]] && return
  local bin
  bin=$(mktemp -d)
  GOBIN=$bin go install "github.com/apache/beam/sdks/v2/$2@v$beam"
  mv "$bin/$(basename "$2")" "$engines/bin/$1"
  rm -r "$bin"
}

job_server() {  # folder; prints the version of Flink that it is for
  local artifact=beam-runners-flink-2.2-job-server
  # --update-snapshots: Maven remembers for a day what it could not have.
  if mvn --quiet --batch-mode --update-snapshots \
    org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
    "-Dartifact=org.apache.beam:$artifact:$beam" "-DoutputDirectory=$1" >"$1/copy.log" 2>&1; then
    mv "$1/$artifact-$beam.jar" "$1/job-server.jar"
    echo 2.2
  else
    echo "$artifact:$beam can't be had here (see $1/copy.log); making one for Flink 1.19" >&2
    cp tests/engines/flink/pom.xml "$1/pom.xml"
    mvn --quiet --batch-mode --file "$1/pom.xml" package >"$1/package.log" 2>&1
    mv "$1/target/flink-job-server-1.19.jar" "$1/job-server.jar"
    rm -r "$1/target"
    echo 1.19
  fi
}

unpack() {  # archive, folder
  case "$1" in
    *.whl) "$python" -m zipfile -e "$1" "$2" ;;
    *) tar --extract --file "$1" --directory "$2" --strip-components 2 --wildcards '*/deps/*' ;;
  esac
}

distribution() {  # version, folder: bin, conf and lib, as in Flink's own archive
  local parts=$2/parts
  mkdir -p "$parts/files/pyflink"
  # The programs are the same for every Python and machine; only to find the wheel are they named.
  "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 \
    --platform manylinux2014_x86_64 --implementation cp --dest "$parts" "apache-flink==$1"
  "$python" -m pip download --quiet --no-deps --dest "$parts" "apache-flink-libraries==$1"
  for archive in "$parts"/apache_flink*.whl; do unpack "$archive" "$parts/files"; done
  for archive in "$parts"/apache*flink*libraries*.tar.gz; do
    if [[ -e $archive ]]; then unpack "$archive" "$parts/files/pyflink"; fi
  done
  for name in bin conf lib; do mv "$parts/files/pyflink/$name" "$2/$name"; done
  chmod +x "$2"/bin/*.sh
  rm -r "$parts"
}

flink() {
  local folder=$engines/flink version
  [[ -e "$folder/version" ]] && return
  rm -rf "$folder"
  mkdir -p "$folder"
  version=$(job_server "$folder")
  if [[ $version == 2.2 ]]; then distribution 2.2.1 "$folder"; else distribution 1.19.3 "$folder"; fi
  echo "$version" >"$folder/version"
}

for engine in "$@"; do
  case $engine in
    prism) go_program prism go/cmd/prism ;;
    boot) go_program boot python/container ;;
    flink) flink ;;
    *) echo "setup.sh: no engine $engine; there are prism, boot and flink" >&2; exit 2 ;;
  esac
done
