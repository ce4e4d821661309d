# Makes `tilewright` importable from a throw-away checkout where nothing can be installed: source this in its root.
for folder in ops arrangements applications; do ln -sfn "../$folder" "tilewright/$folder"; done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
